"""Against a real server: ``transformers serve`` on loopback with a tiny random model. Skips without its packages."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from kbx_env.baselines.llm.access import Access
from kbx_env.baselines.llm.caller import Limits
from kbx_env.baselines.llm.chat import ChatRequest, Finish
from kbx_env.eval import report

NEEDED = ("transformers", "fastapi", "uvicorn")
pytestmark = [
    pytest.mark.serve,
    pytest.mark.skipif(not all(map(importlib.util.find_spec, NEEDED)), reason="needs the extra model-server"),
]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """The model's name and the server's address."""
    from tiny import save

    place = tmp_path_factory.mktemp("serve")
    folder = save(place / "tiny")
    (place / "home/hub").mkdir(parents=True)
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    env = os.environ | {"HF_HOME": str(place / "home"), "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    command = [str(Path(sys.executable).parent / "transformers"), "serve", str(folder), "--device", "cpu"]
    with open(place / "log", "wb") as log:
        server = subprocess.Popen([*command, "--host", "127.0.0.1", "--port", str(port)], stdout=log, stderr=log, env=env)
    try:
        end = time.monotonic() + 120
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1).read()
                break
            except OSError:
                assert server.poll() is None and time.monotonic() < end, (place / "log").read_text()[-2000:]
                time.sleep(0.2)
        yield str(folder), f"http://127.0.0.1:{port}/v1"
    finally:
        server.terminate()
        server.wait(20)


def test_an_answer_is_read_to_its_end(served: tuple[str, str]) -> None:
    name, url = served
    caller = Access(model=name, base_url=url).caller("p")
    ask = ChatRequest(({"role": "user", "content": "Write a kernel."},), 20, temperature=0.7, top_p=0.9)
    reply = caller.session("p", "t", 0).ask("a", ask)
    assert reply.text and reply.finish in (Finish.LENGTH, Finish.STOP) and reply.seconds
    caller.close()


def test_many_at_once(served: tuple[str, str]) -> None:
    name, url = served
    access = Access(model=name, base_url=url, limits=Limits(concurrency=200, attempts=1))
    asks = [(str(i), ChatRequest(({"role": "user", "content": f"{i}?"},), 4, temperature=0.7)) for i in range(200)]
    before, caller = _sockets(), access.caller("p")
    replies = caller.session("p", "t", 0).ask_all(asks)
    assert len(replies) == 200 and not list(access.ledger.log.failures())
    caller.close()
    assert _sockets() <= before, "connections that were kept alive end with their caller"


def _sockets() -> int:
    found = 0
    for entry in os.scandir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the listing's own
            found += os.readlink(entry.path).startswith("socket:")
    return found


@pytest.mark.parametrize("policy", ["deepseek-coder", "kernelagent"])
def test_a_report_over_it(served: tuple[str, str], policy: str, tmp_path: Path) -> None:
    name, url = served
    argv = ["--policy", policy, "--model", name, "--base-url", url, "--backend", "cpu", "--split", "all", "--tasks", "relu,softmax"]
    assert report.main([*argv, "--targets", "none", "--max-tokens", "24", "--out", str(tmp_path / "out")]) == 0
    data = json.loads((tmp_path / "out/report.json").read_text())
    assert data["summary"]["n"] == 2 and data["summary"]["infra_faults"] == 0
    assert {r["verdict"] for r in data["tasks"]} == {"malformed"}, "random weights write no kernel"
    assert data["summary"]["spent"]["calls"] >= 2


def test_a_model_that_it_does_not_have(served: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--policy", "claude", "--model", "/no/such/model", "--base-url", served[1], "--backend", "cpu", "--tasks", "softmax"]
    assert report.main([*argv, "--split", "all", "--attempts", "1", "--out", str(tmp_path / "out")]) == 2
    assert "/no/such/model" in capsys.readouterr().err
