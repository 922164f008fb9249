"""The pipeline: the first stage that fails ends a grading, and everything is closed whatever happens."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from kbx_env.rewards.compose import load_preset

from kbx_env.errors import SandboxError
from kbx_env.grading import pipeline
from kbx_env.grading.context import GradingContext
from kbx_env.grading.grader import Grader
from kbx_env.grading.judge import randomness
from kbx_env.grading.record import OutcomeBuilder
from kbx_env.grading.runtime.untrusted import GradingAborted
from kbx_env.options import GradeOptions
from kbx_env.outcome import Cases, Evidence, Fault, FaultKind, Outcome, Stage, Verdict, Violation
from kbx_env.spec.catalog import expert_source, load_task

TASK = load_task("activation/relu")


class _Context(GradingContext):
    closed = 0

    def close(self) -> None:
        self.closed += 1
        super().close()


class _Stage:
    def __init__(self, ran: list[str], name: str, result: Any = None) -> None:
        self.ran, self.name, self.result = ran, name, result

    def run(self, context: GradingContext) -> Outcome | None:
        self.ran.append(self.name)
        context.stage = Stage.CORRECT
        if isinstance(self.result, Exception):
            raise self.result
        return context.builder.end(*self.result) if self.result else None


@pytest.fixture
def context(monkeypatch: pytest.MonkeyPatch) -> _Context:
    monkeypatch.setattr(pipeline, "cores_are_idle", lambda: False)  # nothing runs beside the proof, however busy the machine is
    builder = OutcomeBuilder(TASK, "cpu", "contract", "", {})
    return _Context(TASK, b"", GradeOptions(backend="cpu"), b"", None, (), builder)  # type: ignore[arg-type]


def _run(monkeypatch: pytest.MonkeyPatch, context: _Context, *results: Any) -> tuple[Outcome, list[str]]:
    ran: list[str] = []
    stages = tuple(_Stage(ran, str(k), result) for k, result in enumerate(results))
    monkeypatch.setattr(pipeline, "STAGES", stages)
    return pipeline.run_pipeline(context), ran


def test_the_first_failing_stage_ends_the_grading(monkeypatch: pytest.MonkeyPatch, context: _Context) -> None:
    outcome, ran = _run(monkeypatch, context, None, (Verdict.INCORRECT, Stage.CORRECT, "off"), None)
    assert (outcome.verdict, outcome.message, ran, context.closed) == (Verdict.INCORRECT, "off", ["0", "1"], 1)


def test_a_submission_that_ends_its_grading_is_told_with_its_stage_and_violations(
    monkeypatch: pytest.MonkeyPatch, context: _Context
) -> None:
    reason = GradingAborted(Verdict.REJECTED, "denied", [Violation("host_traffic", "reads")])
    outcome, ran = _run(monkeypatch, context, None, reason, None)
    assert (outcome.verdict, outcome.stage, ran, context.closed) == (Verdict.REJECTED, Stage.CORRECT, ["0", "1"], 1)
    assert [v.rule for v in outcome.violations] == ["host_traffic"] and outcome.fault_kind is None


def test_the_secret_of_the_grading_places_the_looks_of_its_judges(monkeypatch: pytest.MonkeyPatch, context: _Context) -> None:
    seeds = list[int]()

    class Looks(_Stage):
        def run(self, context: GradingContext) -> Outcome | None:
            seeds.append(randomness.generator(0).initial_seed())
            return context.builder.end(Verdict.INCORRECT, Stage.CORRECT, "off")

    monkeypatch.setattr(pipeline, "STAGES", (Looks([], ""),))
    for secret in (b"one", b"another", b"one"):
        pipeline.run_pipeline(replace(context, secret=secret))
    assert seeds[0] == seeds[2] != seeds[1] and randomness.generator(0).initial_seed() == 0


def test_an_unsupported_kernel_keeps_its_kind(monkeypatch: pytest.MonkeyPatch, context: _Context) -> None:
    reason = GradingAborted(Verdict.INFRA_FAULT, "inline assembly", fault_kind=FaultKind.UNSUPPORTED)
    outcome, _ = _run(monkeypatch, context, reason)
    assert outcome.masked and outcome.fault_kind is FaultKind.UNSUPPORTED


def test_a_wrong_timed_call_is_one_more_case_that_failed(context: _Context) -> None:
    builder, context.stage = context.builder, Stage.TIME
    builder.passed = builder.total = builder.telling_passed = builder.telling = 9
    outcome = context.aborted(GradingAborted(Verdict.INCORRECT, "timed call wrong (n=7): off by 2"))
    assert outcome.cases is not None and (outcome.cases.passed, outcome.cases.total) == (9, 10)
    assert "off by 2" in outcome.cases.failures[0].reason
    # A kernel that is right where it is checked, and wrong where only the clock seems to look, earns less than all cases.
    assert load_preset("default")(outcome) < 0.4


def test_a_fault_of_the_machine_closes_everything_too(monkeypatch: pytest.MonkeyPatch, context: _Context) -> None:
    with pytest.raises(SandboxError):
        _run(monkeypatch, context, SandboxError("no process"))
    assert context.closed == 1


def test_the_documents_list_the_stages_in_order() -> None:
    """The diagram in the module, and the stages that docs/grading.md explains, are the list that runs."""
    names = [type(s).__name__ for s in pipeline.STAGES]
    line = next(t for t in (pipeline.__doc__ or "").splitlines() if t.strip().startswith("source ->"))
    assert re.findall(r"-> (\w+)", line) == [*names, "Outcome"]
    page = (Path(__file__).resolve().parents[2] / "docs/grading.md").read_text()
    places = [page.index(f"| `{name}`") for name in names]
    assert places == sorted(places)

LATE = '''\
import torch
import triton
import triton.language as tl


@triton.jit
def _wide(n):
    return n.to(tl.int64)


@triton.jit
def _gelu(x, y, n, B: tl.constexpr):
    o = tl.program_id(0) * B + tl.arange(0, B)
    v = tl.load(x + o, mask=o < _wide(n), other=0.0)
    tl.store(y + o, v, mask=o < n)


def gelu_fp16(input, approximate="none"):
    y = torch.empty(input.shape, dtype=input.dtype, device=input.device)
    n = input.numel()
    if n:
        _gelu[(triton.cdiv(n, 256),)](input.contiguous(), y, n, B=256)
    return y
'''


def test_an_error_that_one_specialisation_meets_names_line_kernel_case_and_cause(grader: Grader) -> None:
    outcome = grader.grade("activation/gelu_fp16", LATE, backend="cpu", targets=())
    assert outcome.verdict is Verdict.COMPILE_ERROR and outcome.cases is not None
    message, cases = outcome.message, outcome.cases
    assert message.startswith("line 8: ") and "in _wide, called by kernel _gelu in line 14, launched in line 22" in message
    assert "return n.to(tl.int64)" in message and "n=1 (made a constant)" in message
    assert "others of this kernel compiled" in message
    assert cases.stopped_at is not None and cases.stopped_in == "*=()" and cases.stopped_at < cases.total
    assert cases.wrong == cases.stopped_at - 1 - cases.passed >= len(cases.failures)


def test_strides_of_a_failed_case_are_told(grader: Grader) -> None:
    flat = LATE.replace("n.to(tl.int64)", "n").replace("input.contiguous()", "input")
    outcome = grader.grade("activation/gelu_fp16", flat, backend="cpu", targets=("sm_90",))
    assert outcome.cases is not None
    assert any("with strides" in f.layouts for f in outcome.cases.failures)
    assert outcome.compile[0].specialisation.startswith("x *fp16, y *fp16, n i32, B=256; the first of ")


@pytest.mark.parametrize("verdict", [Verdict.CORRECT, Verdict.INCORRECT, Verdict.INFRA_FAULT])
def test_a_proof_that_was_made_before_is_used_and_not_made_again(
    verdict: Verdict, monkeypatch: pytest.MonkeyPatch, context: _Context
) -> None:
    fault = {Verdict.INCORRECT: Fault.POLICY, Verdict.INFRA_FAULT: Fault.INFRA}.get(verdict)
    evidence = Evidence(3) if fault is None else None
    cases = Cases(1, 1) if fault is None else None
    proof = Outcome(TASK.id, verdict, Stage.EVIDENCE, "cpu", "contract", fault, "why", cases, evidence=evidence)
    context.builder = OutcomeBuilder(TASK, "cuda", "contract", "", {})
    context.options = replace(context.options, backend="cuda")
    context.proof = proof
    monkeypatch.setattr(context, "start_spare_runner", lambda: None)
    monkeypatch.setattr(pipeline, "run_pipeline", None)
    outcome = pipeline.ProveOnCpu().run(context)
    assert context.cpu_evidence == evidence
    if verdict is Verdict.INCORRECT:
        assert outcome is not None and (outcome.verdict, outcome.backend) == (verdict, "cuda")
        assert outcome.message == "executed on the CPU tier: why"
    else:
        assert outcome is None


def test_the_proof_takes_one_core(monkeypatch: pytest.MonkeyPatch, context: _Context) -> None:
    """A grader on a machine with 16 cores used all of them for tensors of a few thousand elements."""
    context.builder = OutcomeBuilder(TASK, "cuda", "contract", "", {})
    context.options = replace(context.options, backend="cuda")
    monkeypatch.setattr(context, "start_spare_runner", lambda: None)
    seen: list[int] = []

    def proof(of: Any) -> Outcome:
        seen.append(torch.get_num_threads())
        return of.builder.end(Verdict.INCORRECT, Stage.CORRECT, "why")

    monkeypatch.setattr(pipeline, "run_pipeline", proof)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert pipeline.ProveOnCpu().run(context) is not None
        assert seen == [1] and torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


ZOO = Path(__file__).resolve().parents[1] / "zoo" / "exploits"
ENDING = """

_inner, _calls = ENTRY, []


def ENTRY(*args, **kwargs):
    _calls.append(0)
    y = _inner(*args, **kwargs)
    if len(_calls) == AT:
        END
    return y
"""


def _ending(source: str, entry: str, end: str, at: int) -> str:
    return source + ENDING.replace("ENTRY", entry).replace("AT", str(at)).replace("END", end)


@pytest.mark.parametrize("ending", ["raise ValueError('enough')", "return torch.zeros_like(y)"])
def test_who_ends_before_the_proof_is_paid_for_no_case(grader: Grader, ending: str) -> None:
    """An attack that passes all cases and is refused at the end; going wrong on purpose must not save its credit."""
    source = _ending((ZOO / "f_product_cloned.py").read_text(), "fused_svd_reconstruct", ending, 9)
    outcome = grader.grade("fusion/fused_svd_reconstruct", source, backend="cpu", targets=())
    assert outcome.cases is not None and outcome.cases.passed > 3 and outcome.cases.telling_passed == 0, outcome.message
    assert load_preset("default")(outcome) <= 0.1


def test_an_honest_kernel_that_ends_early_keeps_the_cases_that_it_passed(grader: Grader) -> None:
    source = _ending(expert_source("index/permute_copy") or "", "permute_copy", "raise ValueError('enough')", 12)
    outcome = grader.grade("index/permute_copy", source, backend="cpu", targets=())
    assert outcome.verdict is Verdict.RUNTIME_ERROR and outcome.cases is not None, outcome.message
    assert (outcome.cases.telling_passed or 0) > 3 and load_preset("default")(outcome) > 0.1
