"""The service as a process of its own: ``kill -9`` under load, SIGTERM, its workers killed, bad usage; its live page in a
browser; and schemathesis over its OpenAPI document."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from grading_service import Grader, running
from two_hosts import two_hosts

from kbx_env.__main__ import main
from kbx_env.client import Client, ServiceError
from kbx_env.outcome import Outcome
from kbx_env.spec.catalog import expert_source

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = ("--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking --disable-component-update "
         "--disable-sync").split()  # fmt: skip
TOKEN = "a-token-of-some-length"
WORKERS = """
import os, pathlib, time
from kbx_env.outcome import Cases, Outcome, Stage, Verdict

class Grader:
    def grade(self, task, source, **options):
        with open(os.environ["KBX_GRADED"], "ab", 0) as f:
            f.write(b"%d %s\\n" % (os.getpid(), source))
        time.sleep(0.05)
        return Outcome(task, Verdict.CORRECT, Stage.EVIDENCE, "cpu", "contract", cases=Cases(1, 1))
    def close(self):
        pass
"""
START = """
import sys
from kbx_env.service.server import serve
from kbx_env.service.service import Settings
host, port, store, *token = sys.argv[1:]
token = token[0] if token else None
serve(Settings(host, int(port), "cpu", workers=2, store=store, token_file=token, grader="fake_service_worker:Grader"))
"""
TRAIN = """
import sys, time
from kbx_env import client
client._SILENCE, client._CONNECT = 2.0, 2.0  # seconds after which a connection counts as cut
url, token, count = sys.argv[1:]
found = client.Client(url, token, 100)
while True:
    try:
        found.health()
        break
    except client.ServiceError:
        time.sleep(0.2)
for number, outcome in found.grade_many([("math/abs", str(k)) for k in range(int(count))]):
    print(number, outcome.verdict, flush=True)
"""


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def _with_workers(folder: Path) -> dict[str, str]:
    """Write the module of the fake workers, and return an environment that finds it."""
    (folder / "fake_service_worker.py").write_text(WORKERS)
    env = {**os.environ, "KBX_GRADED": str(folder / "graded")}
    return {**env, "PYTHONPATH": os.pathsep.join([str(folder), *filter(None, [env.get("PYTHONPATH"), *sys.path])])}


@contextlib.contextmanager
def _process(folder: Path, port: int) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-c", START, "127.0.0.1", str(port), str(folder / "gradings.sqlite")]
    process = subprocess.Popen(command, env=_with_workers(folder))
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def _ready(client: Client) -> None:
    end = time.monotonic() + 60
    while True:
        with contextlib.suppress(ServiceError):
            client.health()
            return
        assert time.monotonic() < end
        time.sleep(0.1)


@pytest.mark.full
def test_killed_and_restarted_under_load_nothing_is_lost(tmp_path: Path) -> None:
    port, found, count = _free_port(), dict[int, Outcome](), 300
    client = Client(f"http://127.0.0.1:{port}", timeout_s=120)
    with _process(tmp_path, port) as first:
        _ready(client)
        pairs = [("math/abs", f"{k}") for k in range(count)]
        thread = threading.Thread(target=lambda: found.update(client.grade_many(pairs)))
        thread.start()
        graded = tmp_path / "graded"
        while not graded.exists() or len(graded.read_bytes().splitlines()) < 60:
            time.sleep(0.05)
        os.kill(int(graded.read_bytes().splitlines()[-1].split()[0]), signal.SIGKILL)  # a worker: its grading is tried again
        while len(graded.read_bytes().splitlines()) < 120:
            time.sleep(0.05)
        first.kill()
        first.wait()
        before = len(found)
    with _process(tmp_path, port) as second:
        thread.join(90)
        assert sorted(found) == list(range(count)) and all(o.correct for o in found.values()) and before < count
        lines = [line.split()[1] for line in graded.read_bytes().splitlines()]
        # Only what ran at a kill may have been graded twice: one for the worker, two for the service.
        assert len(set(lines)) == count and len(lines) <= count + 3
        again = len(lines)
        assert dict(client.grade_many(pairs)) == found and len(graded.read_bytes().splitlines()) == again
        number = client.submit("math/abs", "last")
        second.send_signal(signal.SIGTERM)
        assert second.wait(30) == 0
    with _process(tmp_path, port):
        _ready(client)
        outcome = client.result(number, wait=10)
        assert outcome is not None and outcome.correct, "what was accepted before SIGTERM ends after the next start"


@pytest.mark.full
def test_a_cut_link_between_two_hosts_loses_nothing(tmp_path: Path) -> None:
    (tmp_path / "token").write_text(TOKEN)
    env, graded, count = _with_workers(tmp_path), tmp_path / "graded", 300
    with contextlib.ExitStack() as stack:
        try:
            hosts = stack.enter_context(two_hosts())
        except OSError as e:
            pytest.skip(str(e))
        store, token = str(tmp_path / "gradings.sqlite"), str(tmp_path / "token")
        served = [sys.executable, "-c", START, hosts.grader, "8300", store, token]
        trained = [sys.executable, "-c", TRAIN, f"http://{hosts.grader}:8300", TOKEN, str(count)]
        server = hosts.start("grader", served, env=env)
        trainer = hosts.start("trainer", trained, env=env, stdout=subprocess.PIPE, text=True)
        try:
            end = time.monotonic() + 100
            while not graded.exists() or len(graded.read_bytes().splitlines()) < 30:
                assert time.monotonic() < end
                time.sleep(0.05)
            hosts.cut()
            time.sleep(6)
            during = len(graded.read_bytes().splitlines())
            hosts.mend()
            lines = trainer.communicate(timeout=100)[0].splitlines()
        finally:
            for process in (trainer, server):
                process.kill()
                process.wait()
    assert sorted(lines) == sorted(f"{k} correct" for k in range(count)) and during > 60, "grading went on without the link"
    assert sorted(int(line.split()[1]) for line in graded.read_bytes().splitlines()) == list(range(count)), "each once"


def test_bad_usage(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    store = ["--store", str(tmp_path / "g.sqlite")]
    busy = socket.socket()
    busy.bind(("127.0.0.1", 0))
    busy.listen()
    for argv, words in [
        (["--host", "0.0.0.0"], "is not loopback"),
        (["--token-file", str(tmp_path / "none")], "secrets.token_urlsafe"),
        (["--port", str(busy.getsockname()[1])], "choose another --host or --port"),
        (["--port", "99999"], "cannot listen"),
        (["--queue", "3"], "at least 128"),
        (["--host", "no such host"], "no address"),
        (["--executor", "ray", "--gpus", "2"], "Ray takes all GPUs"),
    ]:
        assert main(["serve", "--backend", "cpu", *store, *argv]) == 2
        assert words in capsys.readouterr().err
    busy.close()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if CHROMIUM is None:
        pytest.skip("needs Chromium (apt-get install chromium)")
    with pytest.importorskip("playwright.sync_api").sync_playwright() as p:
        found = p.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield found
        found.close()


@pytest.mark.full
def test_the_live_page_in_a_browser(browser: Any, tmp_path: Path) -> None:
    (tmp_path / "token").write_text(TOKEN)
    grader = Grader()
    with running(tmp_path, grader, token_file=str(tmp_path / "token")) as server:
        client = Client(server.url, TOKEN)
        assert client.grade("math/abs", "right").correct and not client.grade("math/cos", "wrong").correct
        numbers = [client.submit("math/abs", f"wait {k}") for k in range(5)]
        said: list[str] = []
        page = browser.new_page(viewport={"width": 400, "height": 900})
        page.on("pageerror", lambda e: said.append(str(e)))
        page.on("request", lambda r: None if r.url.startswith((server.url, "data:")) else said.append(f"asks for {r.url}"))
        page.goto(server.url)
        page.wait_for_selector("#login:not([hidden])")
        page.fill("#token", "wrong token")
        page.press("#token", "Enter")
        page.wait_for_selector("#refused:has-text('the token is wrong')")
        page.fill("#token", TOKEN)
        page.press("#token", "Enter")
        page.wait_for_selector("#main:not([hidden])")
        page.wait_for_selector("#tiles:has-text('2 of 2')")
        assert "3wait" in page.inner_text("#tiles").replace("\n", "")
        recent = page.inner_text("#recent")
        assert "math/abs" in recent and "incorrect" in recent
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "it fits a phone"
        grader.gate.set()
        page.wait_for_selector("#tiles:has-text('0 of 2')")
        page.reload()
        page.wait_for_selector("#main:not([hidden])")  # the token stays for the session
        assert not said
        page.close()
        assert all(client.result(n, wait=5) for n in numbers)


@pytest.mark.full
def test_schemathesis_finds_no_server_error(tmp_path: Path) -> None:
    pytest.importorskip("schemathesis")
    with running(tmp_path, lambda task, source, **o: Grader()(task, b"right"), width=4) as server:
        command = [
            str(Path(sys.executable).with_name("schemathesis")), "run", f"{server.url}/openapi.json", "--max-examples", "25",
            "--seed", "1", "--checks", "not_a_server_error,response_schema_conformance,status_code_conformance",
            "--request-timeout", "20", "--no-color", "--suppress-health-check", "all",
        ]  # fmt: skip
        ended = subprocess.run(command, capture_output=True, text=True, timeout=280, cwd=tmp_path)
        assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-2000:]


@pytest.mark.full
def test_on_a_ray_cluster_that_loses_a_node(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    small: dict[str, Any] = {"object_store_memory": 80 << 20, "include_dashboard": False}
    port, root = _free_port(), str(Path(__file__).resolve().parents[2])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", root)
        patch.setenv("RAY_memory_monitor_refresh_ms", "0")
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **small})
        nodes = [cluster.add_node(num_cpus=1, **small) for _ in range(2)]
        command = [
            sys.executable, "-m", "kbx_env", "serve", "--backend", "cpu", "--executor", "ray", "--ray-address", cluster.address,
            "--port", str(port), "--store", str(tmp_path / "g.sqlite"),
        ]  # fmt: skip
        process = subprocess.Popen(command)
    try:
        client = Client(f"http://127.0.0.1:{port}", timeout_s=240)
        _ready(client)
        assert client.info()["workers"] == 2 and client.info()["backend"] == "cpu"
        expert = expert_source("random/logspace")
        pairs = [("random/logspace", f"# {k}\n{expert if k % 2 else 'x = 1'}\n") for k in range(10)]
        found = dict[int, Outcome]()
        for number, outcome in client.grade_many(pairs, split="train", targets=[]):
            found[number] = outcome
            if len(found) == 3:
                cluster.remove_node(nodes[0])
        assert [str(found[k].verdict) for k in range(10)] == ["malformed", "correct"] * 5
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
        cluster.shutdown()
