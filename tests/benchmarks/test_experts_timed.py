"""The benchmark of timed kernels, with a stand-in for the pool of GPUs."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import create_autospec

import pytest

from benchmarks import experts_timed
from kbx_env import jsonl
from kbx_env.__main__ import main
from kbx_env.executor.pools.process import Request
from kbx_env.grading import compulsory_work
from kbx_env.grading.timing import task_timing
from kbx_env.outcome import Cases, Outcome, Stage, Timing, Verdict
from kbx_env.spec import packs
from kbx_env.spec.catalog import expert_source, load_task


class StandIn:
    """A pool that times nothing: every kernel is twice as fast as eager, those of packs half as fast."""

    width = 1
    on_attempt: Callable[..., None] | None = None

    def __init__(self) -> None:
        self.requests = list[Request]()

    def grade(self, request: Request, deadline: float) -> Outcome:
        self.requests.append(request)
        assert self.on_attempt is not None
        self.on_attempt(request, 0, 0, 0.0, 0.0)
        speedup = 0.5 if "." in request.task else 2.0
        timing = Timing(speedup, 0.9 * speedup, 1.1 * speedup, None, (), "stand-in")
        cases = Cases(1, 1)
        return Outcome(request.task, Verdict.CORRECT, Stage.TIME, "cuda", "contract", cases=cases, timing=timing)

    def close(self) -> None:
        pass


@pytest.fixture(autouse=True)
def pool(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    monkeypatch.setenv(packs.SELECTED, "")
    monkeypatch.setenv(packs.REGISTERED, "")
    pool = StandIn()
    monkeypatch.setattr(experts_timed, "gpu_pool", lambda *_: pool)
    monkeypatch.setattr(experts_timed, "uuids_of", lambda _: [])
    monkeypatch.setattr(experts_timed.versions, "environment", lambda backend: {"device": f"stand-in for {backend}"})
    yield pool


def run(out: Path, *words: str) -> tuple[int, list[dict[str, Any]], dict[str, Any]]:
    """Return the exit status, the rows and the summary of a command."""
    status = experts_timed.main([str(out), *words])
    *rows, last = jsonl.read(out)
    return status, rows, last["summary"]


def test_kernels_of_a_pack_are_those_of_its_file(tmp_path: Path, pool: StandIn) -> None:
    root = tmp_path / "timed_pack_a"
    for name in ("swish", "mish"):
        assert main(["new-task", f"activation/{name}", "--pack", str(root)]) == 0
    own = "activation/timed_pack_a.swish"
    row = {"task": own, "predict": "# written by the generator", "family": "pointwise", "difficulty": 3}
    (root / "kernels.jsonl").write_text(json.dumps(row) + "\n")
    status, rows, found = run(tmp_path / "out.jsonl", "--tasks-from", f"builtin,{root}", "--tasks", "math/erf,activation/timed*")
    assert status == 0
    sources = {r.task: r.source.decode() for r in pool.requests}
    assert sources[own] == "# written by the generator"
    assert sources["math/erf"] == expert_source("math/erf")
    assert sources["activation/timed_pack_a.mish"] == expert_source("activation/timed_pack_a.mish")
    assert {r["task"]: r.get("family") for r in rows}[own] == "pointwise"
    assert {k: v["tasks"] for k, v in found["speeds"].items()} == {"all": 3, "pointwise": 1}
    assert all(r.options["backend"] == "cuda" and r.options["timing"] for r in pool.requests)


def test_a_count_of_tasks_and_one_without_a_kernel(tmp_path: Path, pool: StandIn, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path / "out.jsonl", "--count", "2", "--tasks", "math/*")[0] == 0
    assert len(pool.requests) == 2
    root = tmp_path / "timed_pack_b"
    assert main(["new-task", "activation/swish", "--pack", str(root)]) == 0
    next((root / "experts").rglob("*.py")).unlink()
    assert experts_timed.main([str(tmp_path / "x.jsonl"), "--tasks-from", str(root)]) == 2
    assert "no kernel of activation/timed_pack_b.swish" in capsys.readouterr().err


def graded(task: str, speedup: float | None, width: float = 0.1) -> dict[str, Any]:
    ends = {"low": None, "high": None} if speedup is None else {"low": speedup * (1 - width), "high": speedup * (1 + width)}
    return {"task": task, "speedup": speedup, **ends}


def test_speeds_count_tasks_and_leave_out_what_was_not_timed() -> None:
    rows = [graded("a", 2.0), graded("a", 0.5), graded("b", 4.0), graded("c", 1.05), graded("d", 0.5), graded("e", None)]
    found = experts_timed.speeds(rows, {"b": "scan", "e": "scan", "c": None})
    assert found["all"]["tasks"] == 4 and found["all"]["speedup"] == pytest.approx((1 * 4 * 1.05 * 0.5) ** 0.25, abs=1e-3)
    assert found["all"]["faster"] == 0.5, "b and c; the mean of a is 1"
    assert found["all"]["surely_faster"] == 0.25 and found["all"]["surely_slower"] == 0.25
    assert found["scan"]["tasks"] == 1 and found["scan"]["low"] is None, "the interval of one task is not known"
    assert set(found) == {"all", "scan"}
    assert experts_timed.speeds([graded("e", None)], {}) == {}


def test_the_memory_of_judging_is_recorded_of_every_case(monkeypatch: pytest.MonkeyPatch) -> None:
    """``--phases`` called the judge without its last parameter, so every grading ended as a fault."""
    judge = create_autospec(task_timing.case_time, return_value="row")
    monkeypatch.setattr(task_timing, "case_time", judge)
    monkeypatch.setattr(experts_timed.torch.cuda, "reset_peak_memory_stats", lambda: None)
    monkeypatch.setattr(experts_timed.torch.cuda, "memory_allocated", lambda: 1 << 30)
    task = load_task("activation/relu")
    case = task.timed[0]
    size = compulsory_work.input_bytes(task, case)
    monkeypatch.setattr(experts_timed.torch.cuda, "max_memory_allocated", lambda: (1 << 30) + 3 * size)
    grader: Any = experts_timed.PhasedGrader.__new__(experts_timed.PhasedGrader)
    grader._judging = []
    grader._watch_judging()
    one: Any = SimpleNamespace(candidate=SimpleNamespace(case=case))
    allocate: Callable[[], None] = lambda: None  # noqa: E731
    assert task_timing.case_time(task, one, None, None, allocate) == "row"  # type: ignore[arg-type]
    judge.assert_called_once_with(task, one, None, None, allocate)
    assert grader._judging == [3.0]
