"""Faults that are not the policy's: tried again, masked when they persist, and never held against a submission."""

from __future__ import annotations

import errno
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from kbx_env.rewards.compose import load_preset

from kbx_env.errors import SandboxError
from kbx_env.executor import Executor, ProcessPool, Request
from kbx_env.executor.direct import retrying
from kbx_env.grading import judge
from kbx_env.grading.grader import Grader
from kbx_env.grading.runtime import engine_client, session, zygote_client
from kbx_env.outcome import GRADER_FAILED, Fault, Outcome, Verdict
from kbx_env.protocol import wire
from kbx_env.spec.catalog import expert_source

TASK = "activation/gelu_fp16"
EXPERT = expert_source(TASK) or ""
# Slow in its first calls, in which it is to be killed; all of them would take seconds, and show nothing more.
SLOW = EXPERT + "\n\n_fast, _calls = gelu_fp16, []\n\n\ndef gelu_fp16(input, approximate='none'):\n    import time\n\n" + (
    "    _calls.append(1)\n    if len(_calls) < 4:\n        time.sleep(0.3)\n    return _fast(input, approximate)\n"
)  # fmt: skip
FORK = """
import errno, os
_fork, _count = os.fork, {count!r}

def fork():
    left = int(open(_count).read())
    if left:
        open(_count, "w").write(str(left - 1))
        raise OSError(errno.ENOMEM, "Cannot allocate memory")
    return _fork()

if {zygote!r} in open("/proc/self/cmdline").read():
    os.fork = fork
"""


@pytest.fixture(scope="module")
def mine() -> Iterator[Grader]:
    """One for all of these tests: it survives each of them. Its zygotes do not, so it is not the shared one."""
    with Grader() as grader:
        yield grader


def grade(grader: Grader, source: str = EXPERT) -> Outcome:
    return retrying(grader.grade)(TASK, source, backend="cpu", targets=(), split="train")


def masked(outcome: Outcome) -> bool:
    """An infrastructure fault with a reason and without a reward."""
    return outcome.fault is Fault.INFRA and bool(outcome.message) and load_preset("default")(outcome) is None


def harmed(grader: Grader, what: Callable[[], int | None], source: str = SLOW, times: int = 1) -> Outcome:
    """Grade while a thread kills what ``what`` names, ``times`` times."""
    over = threading.Event()

    def kill() -> None:
        left, last = times, None
        while left and not over.is_set():
            pid = what()
            if pid is not None and pid != last:
                time.sleep(0.1)
                os.kill(pid, signal.SIGKILL)
                left, last = left - 1, pid
            time.sleep(0.005)

    thread = threading.Thread(target=kill)
    thread.start()
    try:
        return grade(grader, source)
    finally:
        over.set()
        thread.join()


@pytest.fixture
def spawned(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """The latest runner, engine and zygote, by role."""
    found: dict[str, int] = {}
    spawn, ask = zygote_client.Zygote.spawn, zygote_client.Runner.ask
    roles: dict[int, str] = {}

    def spawning(self: zygote_client.Zygote, **settings: object) -> zygote_client.Runner:
        made = spawn(self, **settings)
        roles[made.pid] = str(settings.get("role", "runner"))
        return made

    def asking(self: zygote_client.Runner, header: dict, *args: object, **more: object) -> object:
        if header.get("op") != "load":  # now it is in the middle of a grading
            found[roles[self.pid]] = self.pid
            found["zygote"] = self._zygote._process.pid
        return ask(self, header, *args, **more)

    monkeypatch.setattr(zygote_client.Zygote, "spawn", spawning)
    monkeypatch.setattr(zygote_client.Runner, "ask", asking)
    return found


@pytest.mark.parametrize("role", ["runner", "engine", "zygote"])
def test_a_process_killed_from_outside_is_replaced(mine: Grader, spawned: dict[str, int], role: str) -> None:
    outcome = harmed(mine, lambda: spawned.get(role))
    assert outcome.correct, outcome.message
    assert outcome.manifest["attempt"] == 2  # no runner outlives the zygote
    spawned.clear()
    after = grade(mine)
    assert after.correct and after.manifest["attempt"] == 1


@pytest.mark.parametrize("role", ["runner", "engine"])
def test_what_is_killed_every_time_is_masked(mine: Grader, spawned: dict[str, int], role: str) -> None:
    outcome = harmed(mine, lambda: spawned.get(role), times=100)
    assert masked(outcome) and "killed from outside" in outcome.message, outcome.message
    assert outcome.manifest["attempt"] == 2
    spawned.clear()
    assert grade(mine).correct


def test_a_runner_that_was_denied_something_is_not_excused_by_its_death(mine: Grader, spawned: dict[str, int]) -> None:
    source = SLOW.replace(
        "    _calls", "    try:\n        input + 1\n    except Exception:\n        pass\n    _calls"
    )
    outcome = harmed(mine, lambda: spawned.get("engine") or spawned.get("runner"), source)
    assert outcome.verdict is Verdict.REJECTED, outcome.message


@pytest.mark.parametrize("persists", [False, True])
def test_a_full_disk(mine: Grader, monkeypatch: pytest.MonkeyPatch, persists: bool) -> None:
    mkdtemp, failed = zygote_client.tempfile.mkdtemp, []

    def full(*args: object, **more: object) -> str:
        if persists or not failed:
            failed.append(1)
            raise OSError(errno.ENOSPC, "No space left on device")
        return mkdtemp(*args, **more)  # type: ignore[call-overload]

    for warm in (False, True):  # with the zygote's own folder, and with a runner's
        failed.clear()
        with monkeypatch.context() as patch:
            patch.setattr(zygote_client.tempfile, "mkdtemp", full)
            outcome = grade(mine)
        assert masked(outcome) if persists else outcome.correct, (warm, outcome.message)
        assert outcome.manifest["attempt"] == 2 and (not persists or "No space left" in outcome.message)
        assert grade(mine).correct


def test_triton_on_a_full_disk(mine: Grader, monkeypatch: pytest.MonkeyPatch) -> None:
    source = EXPERT + f"\n\ndef gelu_fp16(input, approximate='none'):\n    raise OSError({errno.ENOSPC}, 'cache')\n"
    assert grade(mine, source).verdict is Verdict.RUNTIME_ERROR  # there is space: not believed
    usage = session.shutil.disk_usage
    monkeypatch.setattr(session.shutil, "disk_usage", lambda p: usage(p)._replace(free=1 << 20))
    assert masked(grade(mine, source))


@pytest.fixture(scope="module")
def forks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Grader, Path]]:
    """A grader whose zygote's next forks fail, as often as the file says."""
    folder = tmp_path_factory.mktemp("forks")
    count = folder / "count"
    count.write_text("0")
    (folder / "sitecustomize.py").write_text(FORK.format(count=str(count), zygote="kbx_env.sandbox.zygote"))
    with Grader() as grader:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PYTHONPATH", f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
            grader.zygote()
        yield grader, count


@pytest.mark.parametrize("times", [1, 99])
def test_no_memory_for_one_more_process(forks: tuple[Grader, Path], times: int) -> None:
    grader, count = forks
    assert grade(grader).correct
    zygote = grader.zygote()
    count.write_text(str(times))
    outcome = grade(grader)
    assert count.read_text() != str(times), "nothing was injected"
    assert outcome.correct if times == 1 else masked(outcome), outcome.message
    assert outcome.manifest["attempt"] == 2
    count.write_text("0")
    assert grade(grader).correct and grader.zygote() is zygote, "the others' processes live on"


@pytest.mark.parametrize(
    "error",
    [RuntimeError("CUDA error: an illegal memory access was encountered"), getattr(torch, "AcceleratorError", OSError)("gone"),
     torch.OutOfMemoryError("CUDA out of memory"), MemoryError(), RecursionError("deep"), KeyError("a bug")],
    ids=lambda e: type(e).__name__,
)  # fmt: skip
@pytest.mark.parametrize("persists", [False, True])
def test_an_error_of_the_grader_itself(
    mine: Grader, monkeypatch: pytest.MonkeyPatch, error: Exception, persists: bool
) -> None:
    judged, failed = judge.judge, []

    def broken(*args: object, **more: object) -> object:
        if persists or not failed:
            failed.append(1)
            raise error
        return judged(*args, **more)

    monkeypatch.setattr(judge, "judge", broken)
    outcome = grade(mine)
    assert outcome.manifest["attempt"] == 2
    assert masked(outcome) and outcome.message.startswith(GRADER_FAILED) if persists else outcome.correct
    monkeypatch.setattr(judge, "judge", judged)
    assert grade(mine).correct


def test_a_worker_whose_gpu_is_dead_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of CUDA stays in its process: only another process helps."""
    (tmp_path / "sick.py").write_text(f"""
import os, pathlib
from kbx_env.grading import judge
from kbx_env.grading.grader import Grader

mark = pathlib.Path({str(tmp_path / "mark")!r})

def dead(*args, **more):
    raise RuntimeError("CUDA error: unspecified launch failure")

def grader():  # called in each worker
    if not mark.exists():
        mark.write_text(str(os.getpid()))
        judge.judge = dead
    return Grader()
""")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with Executor(ProcessPool(1, "sick:grader"), attempts=2) as executor:
        request = Request(TASK, EXPERT.encode(), {"backend": "cpu", "targets": [], "split": "train"})
        assert executor.submit(request).result(120).correct
    assert int((tmp_path / "mark").read_text())


def test_an_engine_out_of_memory_is_the_submissions_doing(mine: Grader) -> None:
    source = EXPERT + (
        "\n\ndef gelu_fp16(input, approximate='none'):\n    x = [torch.empty(n << 28, dtype=torch.uint8, device=input.device)"
        " for n in (1, 16)]\n    x[0][0].item()\n    return torch.empty_like(input)\n"
    )
    outcome = grade(mine, source)
    assert outcome.fault is Fault.POLICY and outcome.message, outcome


@pytest.mark.parametrize("fate", [-11, -6, None])
def test_an_engine_that_its_launches_end_is_the_policys(
    mine: Grader, monkeypatch: pytest.MonkeyPatch, fate: int | None
) -> None:
    def gone(self: zygote_client.Runner, *args: object, **more: object) -> object:
        raise wire.Gone("connection closed")

    engine = engine_client.Engine(mine.zygote())
    monkeypatch.setattr(zygote_client.Runner, "ask", gone)
    monkeypatch.setattr(zygote_client.Runner, "fate", lambda self: fate)
    with pytest.raises(engine_client.EngineError) as caught:
        engine._ask({}, [], 1.0)
    assert caught.value.kind == "died"
    monkeypatch.setattr(zygote_client.Runner, "fate", lambda self: -9)
    with pytest.raises(SandboxError, match="from outside"):
        engine._ask({}, [], 1.0)
    engine.close()


def test_a_zygote_that_does_not_answer_is_given_up(mine: Grader) -> None:
    zygote = mine.zygote()
    os.kill(zygote._process.pid, signal.SIGSTOP)
    zygote._control.settimeout(0.2)
    with pytest.raises(SandboxError):
        zygote.spawn()
    os.kill(zygote._process.pid, signal.SIGCONT)
    with pytest.raises(SandboxError):  # its late answer belongs to nobody
        zygote.spawn()
    assert mine.zygote() is not zygote and grade(mine).correct
