"""What a runner inherits from the zygote, and from which process it is forked."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kbx_env.errors import SandboxError
from kbx_env.grading.grader import Grader
from kbx_env.grading.runtime.zygote_client import OUTSIDE, Runner, Zygote
from kbx_env.sandbox import firewall
from kbx_env.spec.catalog import expert_source

PLAIN: dict[str, Any] = {"device": "cpu", "without": [], "torch_ops": False}
"""Settings of a runner of the CPU tier with all layers."""
ON_GPU: dict[str, Any] = PLAIN | {"device": "cuda"}
"""The same on a GPU."""


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    started = Zygote()
    yield started
    started.close()


def _spawned(zygote: Zygote, **settings: Any) -> Runner:
    runner = zygote.spawn(**settings)
    runner.wait_ready(60)
    return runner


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def _name(pid: int) -> str:
    return Path(f"/proc/{pid}/comm").read_text().strip()


def _sockets(pid: int) -> int:
    links = [os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")]
    return sum(bool(re.match("socket:", link)) for link in links)


def test_runners_that_close_torch_share_a_parent_that_has_closed_it(zygote: Zygote) -> None:
    with _spawned(zygote, **PLAIN) as first, _spawned(zygote, **PLAIN | {"elsewhere": True}) as second:
        assert _parent(first.pid) == _parent(second.pid) and _name(_parent(first.pid)) == "kbx-closed"
        assert _parent(_parent(first.pid)) == zygote._process.pid


def test_runners_of_a_gpu_have_a_parent_of_their_own_that_has_closed_torch(zygote: Zygote) -> None:
    # Without a GPU this runner ends as soon as it starts the driver.
    with _spawned(zygote, **PLAIN) as runner, zygote.spawn(**ON_GPU) as on_gpu:
        of_gpu = _parent(on_gpu.pid)
        assert _name(of_gpu) == "kbx-closed" and of_gpu != _parent(runner.pid)
        assert _parent(of_gpu) == zygote._process.pid
        os.kill(of_gpu, signal.SIGKILL)
        with pytest.raises(SandboxError, match="could not start"):
            while True:  # a request that was sent before it died may still be answered
                zygote.spawn(**ON_GPU).close()
        assert _lives(runner.pid), "the runners of the other device live on"


@pytest.mark.parametrize(
    "settings", [PLAIN | {"torch_ops": True}, PLAIN | {"values": True}, PLAIN | {"without": ["firewall"]}, {"role": "engine"},
                 {"role": "compiler"}]  # fmt: skip
)
def test_who_needs_torch_is_forked_from_the_zygote_itself(zygote: Zygote, settings: dict[str, Any]) -> None:
    closed = settings.get("values") is True  # the paper's grading closes torch unless its operations are allowed
    with _spawned(zygote, **settings) as process:
        assert (_parent(process.pid) == zygote._process.pid) is not closed


def test_a_runner_of_another_device_than_that_for_which_torch_is_closed_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    log = firewall.Log()
    monkeypatch.setattr(firewall, "_ahead", [("cpu", log, [])])
    with pytest.raises(RuntimeError, match="torch was closed for cpu, and this is a runner of cuda"):
        firewall.install("cuda", log)


@pytest.mark.parametrize("settings", [PLAIN, PLAIN | {"torch_ops": True}, {"role": "compiler"}])
def test_a_process_holds_no_socket_on_which_others_are_asked_for(zygote: Zygote, settings: dict[str, Any]) -> None:
    # The first two start the closed forks.
    with zygote.spawn(**ON_GPU) as on_gpu, _spawned(zygote, **PLAIN) as runner, _spawned(zygote, **settings) as process:
        assert _sockets(process.pid) == 1  # its own, to the grader
        assert _sockets(_parent(runner.pid)) == _sockets(_parent(on_gpu.pid)) == 1  # to the zygote


def test_a_closed_fork_that_is_killed_takes_its_runners_along_and_is_replaced(zygote: Zygote) -> None:
    with _spawned(zygote, **PLAIN) as runner:
        lost = _parent(runner.pid)
        os.kill(lost, signal.SIGKILL)
        with pytest.raises(SandboxError, match="could not start"):
            while True:  # a request that was sent before it died may still be answered
                _spawned(zygote, **PLAIN).close()
        assert runner.fate() in OUTSIDE  # never held against the submission
    with _spawned(zygote, **PLAIN) as runner:
        assert _parent(runner.pid) != lost


def test_all_forks_end_with_the_zygote() -> None:
    zygote = Zygote()
    with _spawned(zygote, **PLAIN) as runner, zygote.spawn(**ON_GPU) as on_gpu:
        pids = [runner.pid, _parent(runner.pid), _parent(on_gpu.pid)]
        zygote.close()
        until = time.monotonic() + 10
        while any(map(_lives, pids)) and time.monotonic() < until:
            time.sleep(0.02)
        assert not any(map(_lives, pids))


def test_a_closed_fork_ends_with_a_zygote_that_is_killed() -> None:
    zygote = Zygote()
    with _spawned(zygote, **PLAIN) as runner, zygote.spawn(**ON_GPU) as on_gpu:
        pids = [runner.pid, _parent(runner.pid), _parent(on_gpu.pid)]
        zygote._process.kill()
        until = time.monotonic() + 10
        while any(map(_lives, pids)) and time.monotonic() < until:
            time.sleep(0.02)
        assert not any(map(_lives, pids))
    zygote.close()


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_module_without_bytecode_is_imported_and_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Python writes a module's bytecode at its first import. In a runner that would count as a write of the submission.
    package = tmp_path / "packaging"
    (package / "__pycache__").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "version.py").write_text("Version = str\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    source = "import packaging.version\n" + (expert_source("math/abs") or "") + "\nassert packaging.version.Version is str\n"
    with Grader() as grader:
        outcome = grader.grade("math/abs", source, backend="cpu", targets=())
    assert outcome.correct, outcome.message
    assert not list(package.rglob("*.pyc"))
