"""Kernels of timed calls are compiled together with those of the graded calls."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kbx_env.errors import SandboxError
from kbx_env.grading import inputs, stages
from kbx_env.grading.runtime.session import RunnerSession
from kbx_env.grading.runtime.time_budget import TimeBudget
from kbx_env.grading.runtime.untrusted import GradingAborted
from kbx_env.grading.sizes import timed
from kbx_env.grading.timing import timed_compile
from kbx_env.grading.timing.contestants import PREPARE_SECONDS
from kbx_env.options import GradeOptions
from kbx_env.outcome import Verdict
from kbx_env.spec.catalog import load_task

TASK = load_task("matrixmultiply/matmul")
CASES = timed(TASK, "published")


class _Session:
    """Stands in for a session; each command takes a second of the submission's time."""

    def __init__(self, fails: Callable[[dict[str, Any]], None] = lambda header: None) -> None:
        self.task, self.budget, self.case_bytes = TASK, TimeBudget(30.0), 7
        self.timed_begun, self.timed_compile_seconds, self.lost = False, 0.0, False
        self.asked: list[str] = []
        self._fails = fails

    def header(self, args: dict[str, Any], seed: int) -> dict[str, Any]:
        return {"args": {n: v["shape"] for n, v in args.items() if isinstance(v, dict)}, "entry": "matmul", "positional": []}

    def ask(self, header: dict[str, Any], blobs: Any = None, *, idle: bool = False) -> None:
        assert header["op"] == "time" and header["ahead"] and idle, "no kernel is launched"
        self.budget.spend(1.0)
        self.asked.append(header["do"] if header["do"] != "prepare" else str(header["slots"][0]))
        self._fails(header)


@pytest.fixture(autouse=True)
def _device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(total_memory=140 << 30))


def test_every_timed_case_is_begun_the_largest_first_and_costs_the_submission_no_time() -> None:
    session = _Session()
    timed_compile.begin(TASK, session, "published")  # type: ignore[arg-type]
    assert session.asked[1::2] == ["dry"] * len(CASES) and session.asked[-1] == "release"
    sizes = [{n: list(t.shape) for n, t in inputs.described(TASK, c).items() if isinstance(t, torch.Tensor)} for c in CASES]
    assert sorted(session.asked[:-1:2]) == sorted(map(str, sizes)) and session.asked[0] == str(max(sizes, key=str))
    assert session.timed_begun and session.timed_compile_seconds == PREPARE_SECONDS * len(CASES)
    assert (session.budget.left, session.case_bytes) == (30.0, 7)
    cases, needed, places = timed_compile.largest_first(TASK, "published")
    assert needed == sorted(needed, reverse=True) and [cases[k] for k in places] == list(CASES)


@pytest.mark.parametrize(
    "error", [GradingAborted(Verdict.RUNTIME_ERROR, "CUDA out of memory"), SandboxError("the GPU's memory is full")]
)
def test_an_error_is_left_to_the_timing(error: Exception) -> None:
    def fail(header: dict[str, Any]) -> None:
        if header["do"] == "dry":
            raise error

    session = _Session(fail)
    timed_compile.begin(TASK, session, "published")  # type: ignore[arg-type]
    assert not session.timed_begun and session.asked[1:] == ["dry", "release"]
    assert (session.budget.left, session.case_bytes) == (30.0, 7)


@pytest.mark.parametrize("error", [GradingAborted(Verdict.TIMEOUT, "no result"), SandboxError("the zygote died")])
def test_a_process_that_ended_ends_the_grading(error: Exception) -> None:
    def fail(header: dict[str, Any]) -> None:
        session.lost = True
        raise error

    session = _Session(fail)
    with pytest.raises(type(error), match="on timed sizes: no result" if isinstance(error, GradingAborted) else "zygote"):
        timed_compile.begin(TASK, session, "published")  # type: ignore[arg-type]


@pytest.mark.parametrize("timing, lost, begun", [(True, False, True), (False, False, False), (True, True, False)])
def test_only_what_is_timed_is_compiled_for_timing(
    timing: bool, lost: bool, begun: bool, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    seen = list[str]()
    session = SimpleNamespace(lost=lost, begin_calls=lambda cases, needed: seen.append("graded"))
    options = dataclasses.replace(GradeOptions(backend="cpu"), backend="cuda", timing=timing)
    context: Any = SimpleNamespace(session=session, cases=[], task=TASK, options=options)
    monkeypatch.setattr(timed_compile, "begin", lambda task, session, sizes: seen.append(sizes))
    stages.begin_calls(context)
    assert seen == ["graded", *["published"] * begun]


def test_waiting_for_the_compilers_of_timed_kernels_costs_the_submission_no_time() -> None:
    session: Any = RunnerSession.__new__(RunnerSession)
    session.budget, session.timed_compile_seconds = TimeBudget(30.0), 100.0
    session.budget.compile_left = 0.0
    session._ablated = lambda header, blobs: session.budget.spend(90.0)
    session.finish_compiling()
    assert session.budget.left == 30.0 and session.timed_compile_seconds == 0.0
    session.finish_compiling()
    assert session.budget.left == -60.0, "later compiling is the submission's own"
