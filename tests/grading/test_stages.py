"""The compile stage on a GPU: what is compiled before any call is made, and what follows where that fails."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kbx_env.grading import context as context_module
from kbx_env.grading import pipeline, stages
from kbx_env.grading.ablations import DefenceLayer
from kbx_env.grading.context import GradingContext
from kbx_env.grading.grader import Grader
from kbx_env.grading.record import OutcomeBuilder
from kbx_env.grading.timing import task_timing
from kbx_env.grading.timing.gpu_lock import GpuHold
from kbx_env.options import GradeOptions
from kbx_env.outcome import Build, Outcome, Stage, Verdict
from kbx_env.spec.catalog import expert_source, load_task

TASK = load_task("activation/relu")


class _Session:
    """Stands in for a session with a runner.

    Attributes:
        all: the sessions that were opened.
        fails: whether compiling everything together fails.
    """

    all: list[_Session] = []
    fails = False

    def __init__(self, *args: Any) -> None:
        self.asked: list[str] = []
        self.gpu, self.engine, self.zygote, self.drawn = GpuHold(None), None, None, dict[int, Any]()
        self.gpu.waited = 1.0
        self.all.append(self)

    def __enter__(self) -> _Session:
        return self

    def __exit__(self, *exc: object) -> None:
        self.asked.append("closed")

    def load(self, source: bytes) -> None:
        self.asked.append("load")

    def call(self, *args: Any, **kwargs: Any) -> None:
        self.asked.append("first call")

    def build(self, targets: list[str]) -> list[Build]:
        return [Build("kernel", targets[0], True)]

    def compile_all(self, begin: Any, seconds: float) -> bool:
        begin()
        return not self.fails

    def begin_calls(self, cases: Any, needed: Any) -> None:
        assert len(cases) == len(needed) >= len(TASK.cases)
        self.asked.append("checked")


@pytest.fixture
def context(monkeypatch: pytest.MonkeyPatch) -> GradingContext:
    builder = OutcomeBuilder(TASK, "cuda", "contract", "", {})
    made = GradingContext(TASK, b"", GradeOptions(backend="cpu", targets=("sm_90",)), b"", _Processes(), (), builder)  # type: ignore[arg-type]
    made.options = replace(made.options, backend="cuda")
    monkeypatch.setattr(context_module, "RunnerSession", _Session)
    monkeypatch.setattr(_Session, "all", [])
    monkeypatch.setattr(
        task_timing, "begin_compiling", lambda task, session, sizes: session.asked.append(f"timed {sizes}")
    )  # fmt: skip
    return made


class _Processes:
    compilers = None

    def start(self) -> None: ...

    def zygote(self) -> None: ...

    @property
    def runner_pool(self) -> Any:
        return self

    def take(self, *args: Any) -> str:
        return "runner"

    def ahead(self, *args: Any) -> None: ...


def test_timed_calls_are_compiled_with_the_checked_ones_and_before_them(context: GradingContext) -> None:
    """The largest kernel of a matrix product is one of a timed case: compiling it takes as long as the proof."""
    stages.Compile.compile(context)
    assert [s.asked for s in _Session.all] == [["load", "first call", "timed published", "checked"]]
    assert context.session is _Session.all[0] and len(context.builder.builds) == 1


def test_nothing_timed_is_compiled_where_nothing_is_timed(context: GradingContext) -> None:
    context.options = replace(context.options, timing=False)
    stages.Compile.compile(context)
    assert [s.asked for s in _Session.all] == [["load", "first call", "checked"]]


def test_nothing_timed_is_compiled_for_a_kernel_that_nobody_has_proved(context: GradingContext) -> None:
    """Most are wrong, and would cost the compilers of timed cases as well."""
    as_published = replace(context.options, grading="paper")
    for of in (replace(context, without=(DefenceLayer.PROOF,)), replace(context, options=as_published)):
        stages.Compile.compile(of)
    assert [s.asked for s in _Session.all] == [["load", "first call", "checked"]] * 2


def test_where_that_fails_checked_calls_come_first_in_another_process(
    context: GradingContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel whose host code dies at a timed size keeps what its checked calls are worth, as if it had been timed later."""
    monkeypatch.setattr(_Session, "fails", True)
    context.drawn = {7: ({}, None)}  # type: ignore[dict-item]
    context.cases, context.telling = list(TASK.cases), [True] * len(TASK.cases)
    stages.Compile.compile(context)
    first, second = _Session.all
    assert first.asked[-1] == "closed" and second.asked == ["load", "first call", "checked"]
    assert context.session is second and second.drawn == {7: {}}, "derived cases keep the inputs that they were chosen with"
    assert len(context.builder.builds) == 1
    assert context.builder.gpu is second.gpu and second.gpu.waited == 2.0, "what the first one has waited counts"


LARGE = "if input.numel() > 1 << 20:\n        "


def _graded(body: str) -> Outcome:
    task = "activation/gelu_fp16"
    source = (expert_source(task) or "").replace("return pointwise(", f"{LARGE}{body}\n    return pointwise(")
    with Grader() as grader:
        return grader.grade(task, source, backend="cuda", targets=(), timing=True, precision="training")


@pytest.mark.gpu
@pytest.mark.parametrize("idle", [True, False])
def test_trouble_at_timed_sizes_alone_is_told_after_the_checked_calls(idle: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Idle cores decide only when kernels are compiled."""
    monkeypatch.setattr(pipeline, "cores_are_idle", lambda: idle)
    outcome = _graded("raise ValueError('too large')")
    assert outcome.stage is Stage.TIME and outcome.verdict is Verdict.RUNTIME_ERROR and "too large" in outcome.message, outcome
    assert outcome.cases is not None and outcome.cases.passed == outcome.cases.total > 0


@pytest.mark.gpu
@pytest.mark.parametrize("idle", [True, False])
def test_what_is_tried_at_timed_sizes_before_any_call_is_rejected(idle: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "cores_are_idle", lambda: idle)
    outcome = _graded("try:\n            input + 0\n        except BaseException:\n            raise SystemExit(3)")
    assert outcome.verdict is Verdict.REJECTED and "add" in outcome.message, outcome


@pytest.mark.gpu
@pytest.mark.parametrize("idle", [True, False])
def test_a_process_that_dies_while_timed_kernels_are_compiled_is_replaced(idle: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "cores_are_idle", lambda: idle)
    begin, sessions = task_timing.begin_compiling, list[Any]()

    def die(task: Any, session: Any, *rest: Any) -> None:
        sessions.append(session)
        if len(sessions) == 1:
            session.runner.kill()
        begin(task, session, *rest)

    monkeypatch.setattr(task_timing, "begin_compiling", die)
    outcome = _graded("pass")
    assert outcome.correct, outcome
    assert len(sessions) == 2 and sessions[0] is not sessions[1], "the second one compiles timed kernels when they are timed"
