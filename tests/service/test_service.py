"""The grading service over HTTP: states, sharing, limits, restart and end; the workers are a grade function."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from grading_service import Grader, running, stop

from kbx_env.client import Client
from kbx_env.errors import UsageError
from kbx_env.outcome import Fault, Outcome
from kbx_env.service import guard
from kbx_env.service.journal import Journal
from kbx_env.service.limits import Limits
from kbx_env.service.server import Server
from kbx_env.service.service import Settings, read_token

TOKEN = "a-token-of-some-length"
QUICK = Limits(queue=8, body=20_000, body_seconds=0.6, header_seconds=0.6, connections=20, batch=6)


@pytest.fixture(scope="module")
def grader() -> Grader:
    return Grader()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, grader: Grader) -> Iterator[Server]:
    with running(tmp_path_factory.mktemp("service"), grader, limits=QUICK) as made:
        yield made


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("guarded")
    (folder / "token").write_text(TOKEN + "\n")
    (folder / "token").chmod(0o600)
    with running(folder, Grader(), limits=QUICK, token_file=str(folder / "token")) as made:
        yield made


@pytest.fixture
def http(server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=10) as made:
        yield made


def until(true: Callable[[], bool], seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


def _body(source: str, **more: Any) -> dict[str, Any]:
    return {"task": "math/abs", "source": source, **more}


def test_waits_for_the_outcome_or_tells_the_id(http: httpx.Client, grader: Grader) -> None:
    grader.gate.clear()
    reply = http.post("/v1/gradings", json=_body("right"))
    assert reply.status_code == 200 and Outcome.from_dict(reply.json()["outcome"]).correct
    later = http.post("/v1/gradings", json=_body("wait 1", wait=0))
    assert later.status_code == 202 and later.json()["state"] in ("waiting", "running")
    where = later.headers["location"]
    until(lambda: http.get(where).json()["state"] == "running")
    assert http.get(where).json()["outcome"] is None
    grader.gate.set()
    ended = http.get(where, params={"wait": 5}).json()
    assert ended["state"] == "done" and ended["outcome"]["verdict"] == "correct"
    assert http.delete(where).json()["state"] == "done", "what has ended stays"


def test_equal_requests_are_graded_once_and_a_repeated_one_is_the_same(http: httpx.Client, grader: Grader) -> None:
    grader.gate.clear()
    bodies = [_body("wait twins", options=o, wait=0) for o in ({}, {"split": "eval"}, {"targets": None})]
    ids = [http.post("/v1/gradings", json=b).json()["id"] for b in bodies]
    again = http.post("/v1/gradings", json={**bodies[0], "id": ids[0]})
    assert again.json()["id"] == ids[0] and len(set(ids)) == 3
    assert http.post("/v1/gradings", json=_body("another", id=ids[0])).status_code == 409
    grader.gate.set()
    assert [http.get(f"/v1/gradings/{i}?wait=5").json()["outcome"]["verdict"] for i in ids] == ["correct"] * 3
    assert http.post("/v1/gradings", json=bodies[0] | {"wait": 5}).json()["state"] == "done"
    assert sum(source == b"wait twins" for _, source, _ in grader.calls) == 1


def test_an_infrastructure_fault_is_told_and_not_kept_as_a_verdict(http: httpx.Client, grader: Grader) -> None:
    first = http.post("/v1/gradings", json=_body("lost")).json()
    assert first["outcome"]["fault"] == "infra" and first["outcome"]["manifest"]["attempt"] == 2
    assert http.get(f"/v1/gradings/{first['id']}").json()["outcome"]["message"] == "neighbour out of memory"
    before = len(grader.calls)
    http.post("/v1/gradings", json=_body("lost"))
    assert len(grader.calls) == before + 2


def test_a_withdrawn_request_is_not_graded(http: httpx.Client, grader: Grader) -> None:
    grader.gate.clear()
    busy = [http.post("/v1/gradings", json=_body(f"wait busy {k}", wait=0)).json()["id"] for k in range(2)]
    waiting = http.post("/v1/gradings", json=_body("never", wait=0)).json()["id"]
    assert http.get(f"/v1/gradings/{waiting}").json()["state"] == "waiting"
    assert http.delete(f"/v1/gradings/{waiting}").json()["state"] == "cancelled"
    assert http.get(f"/v1/gradings/{waiting}").json()["state"] == "cancelled"
    grader.gate.set()
    for i in busy:
        http.get(f"/v1/gradings/{i}?wait=5")
    assert all(source != b"never" for _, source, _ in grader.calls)
    assert http.delete(f"/v1/gradings/{'0' * 32}").status_code == 404


def test_a_batch_comes_as_it_ends(http: httpx.Client, grader: Grader) -> None:
    grader.gate.clear()
    batch = {"gradings": [_body("wait batch"), _body("wrong batch"), _body("fine batch")]}
    lines: list[dict[str, Any]] = []
    with http.stream("POST", "/v1/batches", json=batch) as reply:
        assert reply.status_code == 200 and reply.headers["content-type"] == "application/x-ndjson"
        for line in filter(None, reply.iter_lines()):
            lines.append(json.loads(line))
            if len(lines) == 2:
                grader.gate.set()
    assert {r["index"] for r in lines[:2]} == {1, 2} and lines[2]["index"] == 0
    assert http.post("/v1/batches", json={"gradings": [_body("x")] * 7}).status_code == 413
    bad = http.post("/v1/batches", json={"gradings": [_body("x"), {"task": "math/zzz", "source": "x"}]})
    assert bad.status_code == 422 and "grading 1: unknown task" in bad.json()["detail"]


def test_a_full_queue_says_when_to_come_back(http: httpx.Client, grader: Grader) -> None:
    http.post("/v1/gradings", json=_body("right"))
    grader.gate.clear()
    ids = [http.post("/v1/gradings", json=_body(f"wait full {k}", wait=0)).json()["id"] for k in range(8)]
    full = http.post("/v1/gradings", json=_body("one more", wait=0))
    assert full.status_code == 429 and int(full.headers["retry-after"]) >= 1 and "8 of 8" in full.json()["detail"]
    assert http.post("/v1/gradings", json=_body("right")).json()["state"] == "done", "what is stored needs no room"
    grader.gate.set()
    for i in ids:
        assert http.get(f"/v1/gradings/{i}?wait=5").json()["state"] == "done"
    assert http.post("/v1/gradings", json=_body("one more")).status_code == 200


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"task": "math/abs"}, "give source or source_base64"),
        (_body("x", source_base64="eA=="), "not both"),
        ({"task": "math/abs", "source_base64": "?"}, "no base64"),
        (_body("x", id="../../etc/passwd"), "id: "),
        (_body("x", wait=-1), "wait: "),
        (_body("x", options={"proof": {}}), "options.proof: "),
        (_body("x", options={"wall": 1e9}), "at most 120"),
        (_body("x", options={"backend": "cuda"}), "grades on backend 'cpu'"),
        (_body("x", options={"targets": ["sm_1"]}), "unknown target"),
        (_body("x", options={"compiled": True}), "needs a GPU"),
        ({"task": "../../etc/passwd", "source": "x"}, "unknown task"),
        ({"task": "math/\ud800", "source": "x"}, ""),
        ([], ""),
    ],
)  # fmt: skip
def test_what_is_refused_is_named(http: httpx.Client, body: Any, words: str) -> None:
    text = json.dumps(body)
    reply = http.post("/v1/gradings", content=text, headers={"Content-Type": "application/json"})
    assert reply.status_code == 422 and words in reply.json()["detail"]


def test_malformed_json_and_nested_too_deep(http: httpx.Client) -> None:
    for text in ("{", "nope", "[" * 9000, '{"task": NaN}', "\xff"):
        reply = http.post("/v1/gradings", content=text.encode("latin-1"), headers={"Content-Type": "application/json"})
        assert reply.status_code in (400, 422) and reply.json()["detail"]


def test_tasks_and_prompts(http: httpx.Client) -> None:
    tasks = http.get("/v1/tasks").json()
    assert len(tasks) == 176 and set(tasks[0]) == {"task", "entry", "split", "difficulty", "judge", "cases"}
    prompt = http.get("/v1/tasks/math/softmax").json()
    assert "softmax" in prompt["prompt"] and prompt["fingerprint"]
    for path in ("math/zzz", "..%2f..%2fetc%2fpasswd", "%00", "math/softmax/..", "math"):
        reply = http.get(f"/v1/tasks/{path}")
        assert reply.status_code == 404 and "etc" not in reply.headers


def test_metrics_and_state(http: httpx.Client) -> None:
    http.post("/v1/gradings", json=_body("right"))
    text = http.get("/metrics").text
    assert 'kbx_gradings_total{backend="cpu",verdict="correct"}' in text and "kbx_queue_waiting 0.0" in text
    assert http.get("/healthz").json() == {"status": "ok"} and http.get("/readyz").json()["status"] == "ready"
    status = http.get("/v1/status").json()
    assert status["verdicts"]["correct"] >= 1 and status["recent"][0]["task"] == "math/abs"


def test_a_token_is_needed_where_there_is_one(guarded: Server) -> None:
    with httpx.Client(base_url=guarded.url, timeout=10) as http:
        for value in (None, "Bearer wrong", f"Basic {TOKEN}", TOKEN, "Bearer", f"Bearer {TOKEN}x"):
            reply = http.get("/v1/tasks", headers={"Authorization": value} if value else {})
            assert reply.status_code == 401 and reply.headers["www-authenticate"] == "Bearer"
        assert http.get("/metrics").status_code == 401 and http.get("/v1/status").status_code == 401
        for path in ("/healthz", "/readyz", "/", "/openapi.json"):
            assert http.get(path).status_code == 200
    assert Client(guarded.url, TOKEN).grade("math/abs", "right").correct
    with pytest.raises(UsageError, match="valid bearer token"):
        Client(guarded.url, "wrong").grade("math/abs", "right")
    assert TOKEN not in repr(Client(guarded.url, TOKEN))


def test_without_a_token_web_pages_of_others_do_not_reach_it(http: httpx.Client) -> None:
    reply = http.get("/v1/tasks", headers={"Host": "attacker.example"})
    assert reply.status_code == 421 and "attacker.example" in reply.json()["detail"]
    form = http.post("/v1/gradings", content=json.dumps(_body("x")), headers={"Content-Type": "text/plain"})
    assert form.status_code == 422, "what a form can send without asking first is no JSON"


@pytest.mark.parametrize("host", ["0.0.0.0", "::", ""])
def test_no_listening_beyond_loopback_without_a_token(host: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is not loopback"):
        read_token(Settings(host=host))
    (tmp_path / "short").write_text("short")
    with pytest.raises(UsageError, match="at least 16 characters"):
        read_token(Settings(host=host, token_file=str(tmp_path / "short")))
    with pytest.raises(UsageError, match="cannot read"):
        read_token(Settings(host=host, token_file=str(tmp_path / "none")))
    assert read_token(Settings(host="localhost")) is None


def _raw(server: Server, data: bytes, seconds: float = 5.0) -> bytes:
    with socket.create_connection(server.url.removeprefix("http://").rsplit(":", 1), timeout=seconds) as s:  # type: ignore[arg-type]
        s.sendall(data)
        found = b""
        try:
            while got := s.recv(65536):
                found += got
        except OSError:
            pass
        return found


def test_large_and_slow_bodies(server: Server, http: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "_LINGER_SECONDS", 0.2)
    assert http.post("/v1/gradings", json=_body("x" * 30_000)).status_code == 413
    chunked = http.post("/v1/gradings", content=(b"x" * 1000 for _ in range(30)))
    assert chunked.status_code == 413
    head = b"POST /v1/gradings HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: "
    assert b" 413 " in _raw(server, head + b"1000000000\r\n\r\n{").splitlines()[0]
    start = time.monotonic()
    slow = _raw(server, head + b"100\r\n\r\n{")
    assert b" 408 " in slow.splitlines()[0] and b"connection: close" in slow and time.monotonic() - start < 5
    assert _raw(server, b"nonsense\r\n\r\n").startswith(b"HTTP/1.1 400")


def test_sockets_that_are_held_open_keep_nobody_out(server: Server, http: httpx.Client) -> None:
    address = server.url.removeprefix("http://").rsplit(":", 1)
    held = [socket.create_connection(address, timeout=5) for _ in range(60)]  # type: ignore[arg-type]
    try:
        assert http.get("/healthz").status_code == 200 and len(server.server_state.connections) <= 21
        until(lambda: len(server.server_state.connections) <= 2, 5)  # no header came
    finally:
        for s in held:
            s.close()


def test_the_end_answers_all_and_a_restart_takes_up_the_rest(tmp_path: Path) -> None:
    grader = Grader()
    with running(tmp_path, grader) as first, httpx.Client(base_url=first.url, timeout=10) as http:
        ids = [http.post("/v1/gradings", json=_body(f"wait {k}", wait=0)).json()["id"] for k in range(5)]
        until(lambda: http.get(f"/v1/gradings/{ids[1]}").json()["state"] == "running")
        waiting: list[int] = []
        thread = threading.Thread(target=lambda: waiting.append(http.get(f"/v1/gradings/{ids[4]}?wait=20").status_code))
        thread.start()
        time.sleep(0.1)
        stop(first)
        thread.join(5)
        assert waiting == [200], "who waits is answered"
        grader.gate.set()
    assert len(grader.calls) == 2, "running ones end, waiting ones stay"
    with running(tmp_path, grader) as second, httpx.Client(base_url=second.url, timeout=10) as http:
        assert second.service.recovered == 3
        found = [http.get(f"/v1/gradings/{i}?wait=5").json() for i in ids]
        assert [f["outcome"]["verdict"] for f in found] == ["correct"] * 5
    assert sorted(source for _, source, _ in grader.calls) == [f"wait {k}".encode() for k in range(5)]
    journal = Journal(tmp_path / "gradings.sqlite.queue")
    assert not list(journal.waiting())
    with pytest.raises(UsageError, match="another kbx serve"):
        Journal(tmp_path / "gradings.sqlite.queue")
    journal.close()


def test_a_request_of_another_version_that_cannot_be_taken_up_says_so(tmp_path: Path) -> None:
    grader = Grader()
    with running(tmp_path, grader, width=1) as first, httpx.Client(base_url=first.url, timeout=10) as http:
        ids = [http.post("/v1/gradings", json=_body(f"wait {k}", wait=0)).json()["id"] for k in range(2)]
        until(lambda: http.get(f"/v1/gradings/{ids[0]}").json()["state"] == "running")
        stop(first)
        grader.gate.set()
    journal = Journal(tmp_path / "gradings.sqlite.queue")
    (entry,) = journal.waiting()
    journal.add([replace(entry, task="math/gone")]).result(5)
    journal.close()
    with running(tmp_path, grader) as second:
        outcome = Client(second.url).result(ids[1])
        assert outcome is not None and outcome.fault is Fault.INFRA and "cannot be taken up again" in outcome.message
