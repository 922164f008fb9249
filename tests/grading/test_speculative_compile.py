"""Kernels are compiled for the GPU beside the proof on the CPU tier, where cores are idle."""

from __future__ import annotations

import threading
import time
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kbx_env.errors import SandboxError
from kbx_env.grading import context as context_module
from kbx_env.grading import pipeline, speculative_compile, stages
from kbx_env.grading.context import GradingContext
from kbx_env.grading.record import OutcomeBuilder
from kbx_env.grading.runtime.processes import SandboxProcesses
from kbx_env.grading.runtime.session import RunnerSession
from kbx_env.grading.runtime.untrusted import GradingAborted
from kbx_env.options import GradeOptions
from kbx_env.outcome import Stage, Verdict
from kbx_env.spec.catalog import load_task

TASK = load_task("activation/relu")


class _Session:
    """Stands in for a session whose runner is busy until it is abandoned."""

    def __init__(self) -> None:
        self.abandoned = threading.Event()

    def abandon(self) -> None:
        self.abandoned.set()


@pytest.fixture
def context(monkeypatch: pytest.MonkeyPatch) -> GradingContext:
    builder = OutcomeBuilder(TASK, "cuda", "contract", "", {})
    made = GradingContext(TASK, b"", GradeOptions(backend="cpu"), b"", None, (), builder)  # type: ignore[arg-type]
    made.options = replace(made.options, backend="cuda")
    monkeypatch.setattr(made, "start_spare_runner", lambda: None)
    monkeypatch.setattr(pipeline, "cores_are_idle", lambda: True)
    return made


def _proves(monkeypatch: pytest.MonkeyPatch, verdict: Verdict, before: Any = lambda: None) -> None:
    def run(of: GradingContext) -> Any:
        before()
        if verdict is Verdict.CORRECT:
            of.builder.total = of.builder.passed = 1
        return of.builder.end(verdict, Stage.CORRECT, "why")

    monkeypatch.setattr(pipeline, "run_pipeline", run)


def test_what_is_done_beside_the_proof_costs_no_time_of_its_own(context: GradingContext, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = threading.Event()

    def work(of: GradingContext) -> None:
        with of.timed(Stage.COMPILE):
            begun.set()
            time.sleep(0.05)

    monkeypatch.setattr(stages.Compile, "compile", staticmethod(work))
    _proves(monkeypatch, Verdict.CORRECT, lambda: begun.wait(10) and time.sleep(0.2))
    began = time.perf_counter()
    assert pipeline.ProveOnCpu().run(context) is None
    assert sum(context.builder.seconds.values()) <= time.perf_counter() - began
    assert context.builder.seconds["proof"] >= 0.2 and context.builder.seconds[Stage.COMPILE] < 0.05
    monkeypatch.setattr(stages.Compile, "compile", None)
    assert stages.Compile().run(context) is None, "it is not done again"


def test_an_error_beside_the_proof_is_told_after_the_proof(context: GradingContext, monkeypatch: pytest.MonkeyPatch) -> None:
    def work(of: GradingContext) -> None:
        raise GradingAborted(Verdict.RUNTIME_ERROR, "died")

    monkeypatch.setattr(stages.Compile, "compile", staticmethod(work))
    _proves(monkeypatch, Verdict.CORRECT)
    assert pipeline.ProveOnCpu().run(context) is None
    with pytest.raises(GradingAborted, match="died"):
        stages.Compile().run(context)


@pytest.mark.parametrize("error", [None, SandboxError("the sandbox is gone")])
def test_a_proof_that_fails_ends_the_work_beside_it(
    error: Exception | None, context: GradingContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = _Session()
    context._session = session  # type: ignore[assignment]
    ended = threading.Event()

    def work(of: GradingContext) -> None:
        assert session.abandoned.wait(30)
        ended.set()
        raise GradingAborted(Verdict.RUNTIME_ERROR, "the grading was given up")

    def fail() -> None:
        if error is not None:
            raise error

    monkeypatch.setattr(stages.Compile, "compile", staticmethod(work))
    _proves(monkeypatch, Verdict.INCORRECT, fail)
    if error is None:
        outcome = pipeline.ProveOnCpu().run(context)
        assert outcome is not None and outcome.message == "executed on the CPU tier: why"
    else:
        with pytest.raises(SandboxError, match="gone"):
            pipeline.ProveOnCpu().run(context)
    assert ended.is_set() and context.speculative is None


def test_where_cores_are_busy_the_proof_comes_first(context: GradingContext, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "cores_are_idle", lambda: False)
    monkeypatch.setattr(stages.Compile, "compile", staticmethod(lambda of: pytest.fail("compiled for a kernel that may be wrong")))
    _proves(monkeypatch, Verdict.CORRECT)
    assert pipeline.ProveOnCpu().run(context) is None and context.speculative is None


class _Opened:
    """Stands in for a session that was just opened."""

    def __init__(self, *args: Any) -> None:
        self.gpu, self.drawn = None, dict[int, Any]()


def _with_runner(context: GradingContext, monkeypatch: pytest.MonkeyPatch, started: Future[Any]) -> None:
    """Give a context a runner that is starting, and let the work beside the proof open the session."""

    def take(zygote: Any, settings: Any, abandoned: Future[None]) -> Any:
        wait((started, abandoned), return_when=FIRST_COMPLETED)
        return started.result() if started.done() else None

    context.processes = SimpleNamespace(runner_pool=SimpleNamespace(take=take), zygote=lambda: None, compilers=None)  # type: ignore[assignment]
    monkeypatch.setattr(context_module, "RunnerSession", _Opened)
    monkeypatch.setattr(stages.Compile, "compile", staticmethod(lambda of: of.open_session()))


def test_a_proof_that_fails_waits_for_no_runner(context: GradingContext, monkeypatch: pytest.MonkeyPatch) -> None:
    """One wrong kernel right after the other: the next runner takes a second to start, the proof a third of that."""
    _with_runner(context, monkeypatch, Future())
    _proves(monkeypatch, Verdict.INCORRECT)
    outcome = pipeline.ProveOnCpu().run(context)
    assert outcome is not None and outcome.verdict is Verdict.INCORRECT and context._session is None
    context.abandon_session()  # again


def test_the_work_beside_the_proof_waits_for_its_runner(context: GradingContext, monkeypatch: pytest.MonkeyPatch) -> None:
    started: Future[Any] = Future()
    _with_runner(context, monkeypatch, started)

    def proved() -> None:
        time.sleep(0.05)
        assert context._session is None
        started.set_result("runner")

    _proves(monkeypatch, Verdict.CORRECT, proved)
    assert pipeline.ProveOnCpu().run(context) is None
    assert isinstance(context._session, _Opened) and context.speculative is not None


@pytest.mark.parametrize(
    "text, idle",
    [("0.1 0.2 0.3 1/200 77\n", True), ("0.1 0.2 0.3 4/200 77\n", True), ("0.1 0.2 0.3 5/200 77\n", False),
     ("0.1 0.2 0.3 0/0 77\n", False), ("", False), ("a b c d e", False)],
)  # fmt: skip
def test_cores_are_idle_where_few_threads_run(text: str, idle: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speculative_compile, "Path", lambda path: SimpleNamespace(read_text=lambda: text))
    monkeypatch.setattr(speculative_compile.os, "sched_getaffinity", lambda pid: set(range(16)))
    assert speculative_compile.cores_are_idle() is idle


def test_an_abandoned_command_ends_at_once(tmp_path: Path) -> None:
    processes, found = SandboxProcesses(), list[BaseException]()
    try:
        with RunnerSession(processes.zygote(), TASK, "cpu", b"s", "train", 60.0) as session:

            def load() -> None:
                try:
                    session.load(b"while True:\n    pass\n")
                except BaseException as e:
                    found.append(e)

            thread = threading.Thread(target=load)
            thread.start()
            time.sleep(0.5)
            began = time.monotonic()
            session.abandon()
            thread.join(30)
            assert not thread.is_alive() and time.monotonic() - began < 5
            assert isinstance(found[0], GradingAborted) and "given up" in found[0].message
            drawn: list[int] = []
            session.draw_call = lambda case, index, *rest: drawn.append(index)  # type: ignore[assignment, method-assign, return-value]
            session.begin_calls(TASK.cases, [1] * len(TASK.cases))
            assert not drawn, "nothing is prepared for a runner that is gone"
    finally:
        processes.close()
