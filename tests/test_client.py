"""The clients of the grading service: outcomes, batches, cuts, time limits, pickling; against a service in this process."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import pickle
import socketserver
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import trustme
from cut_link import link
from grading_service import Grader, running

from kbx_env import client as clients
from kbx_env.client import AsyncClient, Client, ServiceError
from kbx_env.errors import UsageError
from kbx_env.outcome import FaultKind, Outcome
from kbx_env.service.limits import Limits
from kbx_env.service.server import Server


@pytest.fixture(scope="module")
def grader() -> Grader:
    return Grader()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, grader: Grader) -> Iterator[Server]:
    with running(tmp_path_factory.mktemp("client"), grader, width=4, limits=Limits(queue=150)) as made:
        yield made


@pytest.fixture
def client(server: Server) -> Iterator[Client]:
    with Client(server.url, timeout_s=20) as made:
        yield made


def _until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + 10
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_the_same_outcome_as_without_a_wire(client: Client, grader: Grader) -> None:
    for source in ("right", "wrong", b"bytes \xff", "surrogate \ud800"):
        found = client.grade("math/abs", source, split="train", priority=3)
        data = source.encode("utf-8", "surrogatepass") if isinstance(source, str) else source
        expected = grader("math/abs", data)
        assert found == replace(expected, manifest={"attempt": 1}) and grader.calls[-2][1] == data
        assert grader.calls[-2][2]["split"] == "train"
    assert client.health()["status"] == "ready" and client.info()["backend"] == "cpu"
    assert len(client.tasks()) == 176 and "softmax" in client.prompt("math/softmax")


def test_submit_result_cancel(client: Client, grader: Grader) -> None:
    grader.gate.clear()
    number = client.submit("math/abs", "wait for result")
    assert client.result(number) is None
    grader.gate.set()
    assert client.result(number, wait=5) is not None and not client.cancel(number)
    grader.gate.clear()
    numbers = [client.submit("math/abs", f"wait to cancel {k}") for k in range(5)]
    assert client.cancel(numbers[4])
    grader.gate.set()
    with pytest.raises(ServiceError, match="it is cancelled"):
        client.result(numbers[4])
    with pytest.raises(UsageError, match="no grading"):
        client.result("0" * 32)


def test_a_batch_larger_than_the_queue(client: Client, grader: Grader, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "BATCH", 60)
    before = len(grader.calls)
    pairs = (("math/abs", f"many {k} {'wrong' if k % 3 else ''}") for k in range(300))
    found = dict(client.grade_many(pairs))
    assert sorted(found) == list(range(300)) and all(found[k].correct == (k % 3 == 0) for k in found)
    assert len(grader.calls) - before == 300
    assert list(client.grade_many([])) == []
    with pytest.raises(UsageError, match="unknown task"):
        list(client.grade_many([("math/abs", "fine"), ("nope", "x")]))
    with pytest.raises(UsageError, match="cannot grade"):
        list(client.grade_many(["math/abs"]))  # type: ignore[list-item]


def test_leaving_a_batch_early_withdraws_the_rest(client: Client, grader: Grader) -> None:
    grader.gate.clear()
    stream = client.grade_many([("math/abs", "soon")] + [("math/abs", f"wait early {k}") for k in range(20)])
    assert next(stream)[0] == 0
    stream.close()
    monitored = client.health
    # The thread sees it with the next line of the stream.
    grader.gate.set()
    _until(lambda: monitored()["waiting"] == 0)
    assert sum(s.startswith(b"wait early") for _, s, _ in grader.calls) <= 20


def test_without_an_answer_in_time_it_is_an_infrastructure_fault(
    server: Server, grader: Grader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kbx_env.service.app.BEAT", 0.1)
    grader.gate.clear()
    impatient = Client(server.url, timeout_s=0.3)
    outcome = impatient.grade("math/abs", "wait too long")
    assert outcome.fault_kind is FaultKind.DEADLINE and "within 0.3 s" in outcome.message and outcome.masked
    late = dict(impatient.grade_many([("math/abs", "wait much too long")]))
    assert late[0].fault_kind is FaultKind.DEADLINE
    grader.gate.set()
    away = Client("http://127.0.0.1:1", timeout_s=0.3)
    assert away.grade("math/abs", "x").fault_kind is FaultKind.DEADLINE
    assert dict(away.grade_many([("math/abs", "x")]))[0].fault_kind is FaultKind.DEADLINE
    with pytest.raises(ServiceError, match="start one with kbx serve"):
        away.health()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(("ftp://x",), "address"), ((None,), "address"), (("http://x", None, 0), "timeout_s"), (("http://x", "a b"), "token")],
)  # fmt: skip
def test_arguments(arguments: tuple[Any, ...], words: str) -> None:
    for kind in (Client, AsyncClient):
        with pytest.raises(UsageError, match=words):
            kind(*arguments)


def _in_another_process(client: Client, queue: Any) -> None:
    queue.put(client.grade("math/abs", "elsewhere").to_json())


def test_it_can_be_pickled_and_forked(client: Client) -> None:
    client.health()
    for other in (pickle.loads(pickle.dumps(client)), client):
        context = multiprocessing.get_context("fork")
        queue = context.SimpleQueue()
        process = context.Process(target=_in_another_process, args=(other, queue))
        process.start()
        assert '"verdict": "correct"' in queue.get()
        process.join(10)
    copy = pickle.loads(pickle.dumps(AsyncClient(client.url, "a-token", 3)))
    assert (copy.url, copy.token, copy.timeout_s) == (client.url, "a-token", 3)


def test_async(server: Server, grader: Grader) -> None:
    async def use() -> None:
        async with AsyncClient(server.url, timeout_s=20) as client:
            assert (await client.grade("math/abs", "async")).correct
            found = {n: o async for n, o in client.grade_many([("math/abs", f"async {k}") for k in range(300)])}
            assert sorted(found) == list(range(300))
            assert (await client.health())["status"] == "ready" and len(await client.tasks()) == 176
            assert "abs" in await client.prompt("math/abs") and (await client.info())["backend"] == "cpu"
            number = await client.submit("math/abs", "async later")
            assert await client.result(number, wait=5) and not await client.cancel(number)
            grader.gate.clear()
            task = asyncio.create_task(client.grade("math/abs", "wait async"))
            await asyncio.sleep(0.2)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert (await client.health())["waiting"] == 0
            grader.gate.set()
            with pytest.raises(UsageError, match="unknown option|Extra inputs"):
                await client.grade("math/abs", "x", nope=1)

    made = AsyncClient(server.url, timeout_s=20)
    asyncio.run(use())
    for _ in range(2):  # a loop of its own each time
        assert asyncio.run(made.grade("math/abs", "async")).correct


@pytest.mark.parametrize("reset", [pytest.param(True, marks=pytest.mark.full), False])
def test_a_cut_link_in_a_batch_loses_nothing(
    reset: bool, server: Server, grader: Grader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clients, "_SILENCE", 0.5)
    monkeypatch.setattr("kbx_env.service.app.BEAT", 0.1)
    grader.gate.clear()
    pairs = [("math/abs", f"cut {reset} {k}") for k in range(10)] + [("math/abs", f"wait cut {reset} {k}") for k in range(20)]
    with link(server.url) as way:
        client = Client(f"http://127.0.0.1:{way.port}", timeout_s=20)
        found: dict[int, Outcome] = {}
        stream = client.grade_many(pairs)
        while len(found) < 10:
            number, outcome = next(stream)
            found[number] = outcome
        way.cut(reset)
        threading.Timer(1.2, way.mend).start()
        grader.gate.set()  # they end while the link is cut
        for number, outcome in stream:
            assert number not in found
            found[number] = outcome
    assert sorted(found) == list(range(30)) and all(o.correct for o in found.values())
    graded = [source for _, source, _ in grader.calls if b"cut %s" % str(reset).encode() in source]
    assert len(graded) == len(set(graded)) == 30


def test_a_restart_in_the_middle_loses_nothing(tmp_path: Path) -> None:
    grader, found = Grader(), dict[int, Outcome]()
    with running(tmp_path, grader) as first:
        port = int(first.url.rsplit(":", 1)[1])
        client = Client(first.url, timeout_s=30)
        pairs = [("math/abs", f"wait {k}" if k > 3 else f"now {k}") for k in range(12)]
        thread = threading.Thread(target=lambda: found.update(client.grade_many(pairs)))
        thread.start()
        _until(lambda: len(grader.calls) >= 6)
        threading.Timer(0.5, grader.gate.set).start()
    with running(tmp_path, grader, at=port):
        thread.join(20)
        assert sorted(found) == list(range(12)) and all(o.correct for o in found.values())
    assert len(grader.calls) == 12


@pytest.fixture
def encrypted() -> Iterator[tuple[str, trustme.CA]]:
    """A server that speaks TLS and nothing more, and who signed its certificate."""
    authority = trustme.CA()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), _Handshake) as made:
        made.daemon_threads = True
        made.context = context  # type: ignore[attr-defined]
        threading.Thread(target=made.serve_forever, args=(0.02,), daemon=True).start()
        yield f"https://127.0.0.1:{made.server_address[1]}", authority
        made.shutdown()


class _Handshake(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        with contextlib.suppress(OSError), self.server.context.wrap_socket(self.request, server_side=True) as talk:  # type: ignore[attr-defined]
            talk.recv(1 << 16)
            talk.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nnull")


def test_a_certificate_that_nobody_trusts_is_an_error_at_once(encrypted: tuple[str, trustme.CA]) -> None:
    url, _ = encrypted
    began = time.monotonic()
    with Client(url) as made:
        for call in (lambda: made.grade("math/abs", "right"), lambda: list(made.grade_many([("math/abs", "right")])), made.health):
            with pytest.raises(UsageError, match="certificate is not trusted .*SSL_CERT_FILE"):
                call()

    async def ask() -> None:
        async with AsyncClient(url) as made:
            await made.grade("math/abs", "right")

    with pytest.raises(UsageError, match="certificate is not trusted"):
        asyncio.run(ask())
    assert time.monotonic() - began < 10


def test_an_authority_of_ones_own_is_named_by_ssl_cert_file(
    encrypted: tuple[str, trustme.CA], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, authority = encrypted
    authority.cert_pem.write_to_path(str(tmp_path / "authority.pem"))
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "authority.pem"))
    with Client(url) as made:
        assert made.health() is None
