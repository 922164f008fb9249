"""Several GPUs seen as one place to grade: requests spread over all, each by a process that sees one GPU."""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter
from pathlib import Path

import pytest

from kbx_env.confinement import landlock_version
from kbx_env.errors import UsageError
from kbx_env.executor import Executor
from kbx_env.executor.pools import gpu as gpu_lanes
from kbx_env.executor.pools import gpu_files
from kbx_env.executor.pools.gpu import GpuPool, gpu_pool, pool_on, uuids_of
from kbx_env.executor.pools.process import InlinePool, Request, WorkerLost
from kbx_env.outcome import Cases, Outcome, Stage, Verdict


def answer(task: str, note: str = "") -> Outcome:
    return Outcome(task, Verdict.CORRECT, Stage.EVIDENCE, "cpu", "contract", message=note, cases=Cases(1, 1))


SEER = """
import os
from kbx_env.outcome import Cases, Outcome, Stage, Verdict

class Grader:
    def grade(self, task, source, **options):
        said = f"{os.environ['CUDA_VISIBLE_DEVICES']} of {os.getpid()}"
        return Outcome(task, Verdict.CORRECT, Stage.EVIDENCE, "cpu", "contract", message=said, cases=Cases(1, 1))

    def close(self):
        pass
"""


def test_every_worker_sees_one_gpu_and_all_get_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "seer.py").write_text(SEER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5, 7,9")
    with Executor(gpu_pool(2, 2, "seer:Grader")) as executor:
        found = executor.grade_many([Request("t", b"%d" % k) for k in range(8)], progress=False)
    seen = {o.message.split(" of ")[0] for o in found}
    assert seen == {"5", "7"} and len({o.message for o in found}) == 4, "two processes each"


@pytest.mark.skipif(landlock_version() < 2, reason="this kernel has no Landlock, or its first version")
def test_a_worker_cannot_open_the_other_gpus_of_its_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {f"GPU-{k}": tmp_path / f"nvidia{k}" for k in range(2)}
    for file in files.values():
        file.touch()
    told = "said += ' '.join(str(os.path.basename(f)) for f in FILES if opens(f))"
    (tmp_path / "seer.py").write_text(SEER.replace("return", f"{told}\n        return") + f"""
FILES = {[str(f) for f in files.values()]}

def opens(file):
    try:
        return bool(open(file, "w"))
    except PermissionError:
        return False
""")  # fmt: skip
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    monkeypatch.setattr(gpu_files, "others", lambda uuid: [str(f) for u, f in files.items() if u != uuid])
    with Executor(gpu_pool(2, 1, "seer:Grader", list(files))) as executor:
        found = executor.grade_many([Request("t", b"%d" % k) for k in range(4)], progress=False)
    # By its id: a process that sees one GPU has no second number.
    seen = {(o.message.split(" of ")[0], o.message[-7:]) for o in found}
    assert seen == {("GPU-0", "nvidia0"), ("GPU-1", "nvidia1")}


def test_few_requests_are_spread_and_a_lost_one_frees_its_place() -> None:
    together = threading.Barrier(2, timeout=20)
    spans: list[tuple[str, int, int]] = []

    def grade(gpu: int, task: str) -> Outcome:
        if task == "lost":
            raise WorkerLost("gone")
        if task == "both":
            together.wait()  # only if two GPUs are at work at once
        return answer(task, str(gpu))

    lanes = GpuPool([InlinePool(lambda task, source, gpu=k, **_: grade(gpu, task), 2) for k in range(2)])
    lanes.on_attempt = lambda request, gpu, worker, begin, end: spans.append((request.task, gpu, worker)) if begin <= end else None
    assert lanes.width == 4
    with Executor(lanes, attempts=1) as executor:
        found = executor.grade_many([Request("both", b"%d" % k) for k in range(2)], progress=False)
        assert {o.message for o in found} == {"0", "1"}
        for k in range(6):
            assert executor.submit(Request("lost", b"%d" % k)).result(20).verdict is Verdict.INFRA_FAULT
        assert executor.submit(Request("t", b"x")).result(20).correct
    assert Counter(task for task, _, _ in spans) == {"both": 2, "lost": 6, "t": 1}


def test_a_gpu_that_loses_all_draws_little_of_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_lanes, "REST", (0.05, 0.2))
    at: Counter[int] = Counter()
    healed = threading.Event()

    def grade(gpu: int, task: str) -> Outcome:
        at[gpu] += 1
        if gpu == 0 and not healed.is_set():
            raise WorkerLost("no GPU")
        time.sleep(0.005)
        return answer(task)

    lanes = GpuPool([InlinePool(lambda task, source, gpu=k, **_: grade(gpu, task), 2) for k in range(2)])
    with Executor(lanes) as executor:
        found = executor.grade_many([Request("t", b"%d" % k) for k in range(100)], progress=False)
        assert at[0] < 20 and all(o.correct for o in found), "a lost request goes to the other GPU"
        healed.set()
        time.sleep(0.25)
        at.clear()
        assert all(o.correct for o in executor.grade_many([Request("u", b"%d" % k) for k in range(40)], progress=False))
        assert at[0] > 10, "and gets its share again once it is well"


def test_where_all_gpus_lose_nobody_waits_for_a_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_lanes, "REST", (60.0, 60.0))

    def grade(task: str) -> Outcome:
        if task == "lost":
            raise WorkerLost("no GPU")
        return answer(task)

    lanes = GpuPool([InlinePool(lambda task, source, **_: grade(task), 2) for _ in range(2)])
    with Executor(lanes, attempts=1) as executor:
        for k in range(8):
            assert executor.submit(Request("lost", b"%d" % k)).result(20).verdict is Verdict.INFRA_FAULT
        assert executor.submit(Request("t", b"x")).result(20).correct


def test_a_request_that_is_late_makes_no_gpu_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_lanes, "REST", (60.0, 60.0))

    def grade(task: str) -> Outcome:
        if task == "late":
            time.sleep(0.06)
            raise WorkerLost("no verdict within 0.1 s")
        return answer(task)

    lanes = GpuPool([InlinePool(lambda task, source, **_: grade(task), 1) for _ in range(2)])
    for _ in range(2):
        with pytest.raises(WorkerLost):
            lanes.grade(Request("late", b""), 0.1)
    assert lanes.grade(Request("t", b""), 0.1).correct and lanes._rests_until == [0.0, 0.0]


def test_gpus_that_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    assert uuids_of(0) == []
    with pytest.raises(UsageError, match="--gpus is -1"):
        uuids_of(-1)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda k: f"GPU model {k}")
    with pytest.raises(UsageError, match="torch finds 2"):
        uuids_of(3)
    with pytest.raises(UsageError, match="GPU model 0, GPU model 1"):
        uuids_of(2)


class Driver:
    """A stand-in for ``pynvml`` with two equal GPUs and another one."""

    class NVMLError(Exception):
        pass

    models = ("H200", "H200", "L4")

    def nvmlInit(self) -> None: ...

    def nvmlDeviceGetHandleByIndex(self, number: int) -> int:
        if number >= len(self.models):
            raise self.NVMLError("Invalid Argument")
        return number

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:
        return self.nvmlDeviceGetHandleByIndex(int(uuid.removeprefix("GPU-")))

    def nvmlDeviceGetUUID(self, handle: int) -> str:
        return f"GPU-{handle}"

    def nvmlDeviceGetName(self, handle: int) -> str:
        return self.models[handle]


def test_named_gpus_need_not_be_seen_by_this_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "seer.py").write_text(SEER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setitem(sys.modules, "pynvml", Driver())
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    pool, device = pool_on([1, "GPU-0"], 1, "seer:Grader")
    with Executor(pool) as executor:
        found = executor.grade_many([Request("t", b"%d" % k) for k in range(4)], progress=False)
    assert device == "H200" and {o.message.split(" of ")[0] for o in found} == {"GPU-1", "GPU-0"}


@pytest.mark.parametrize(
    "gpus, said",
    [
        ([], "at least one"), ([0, "GPU-0"], "each GPU once"), ([0, 2], "different models"), ([9], "does not find"),
        (["GPU-7"], "nvidia-smi -L"),
    ],
)  # fmt: skip
def test_named_gpus_that_cannot_be_used(gpus: list[int | str], said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", Driver())
    with pytest.raises(UsageError, match=said):
        pool_on(gpus, 1)


def test_named_gpus_without_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(UsageError, match="no NVIDIA driver"):
        pool_on([0], 1)
