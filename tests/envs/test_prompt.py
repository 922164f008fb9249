"""What a policy reads: the whole contract, and feedback that helps, is bounded and gives no input away."""

from __future__ import annotations

import pytest

from kbx_env.envs.prompt import feedback, instruction
from kbx_env.outcome import (
    Build,
    CaseFailure,
    Cases,
    CaseTime,
    Evidence,
    Fault,
    Outcome,
    Stage,
    Timing,
    Verdict,
    Violation,
)
from kbx_env.spec.catalog import load_task, task_ids


@pytest.mark.parametrize("name", task_ids())
def test_the_instruction_holds_signature_contract_and_rules(name: str) -> None:
    task = load_task(name)
    text = instruction(task, "cpu")
    assert f"{task.entry}{task.signature}" in text and task.spec in text
    assert "torch.empty" in text and "64 scalars" in text and "{" not in text.split("Contract")[0]


def test_the_instruction_says_whether_speed_counts() -> None:
    task = load_task("math/softmax")
    assert "not timed" in instruction(task, "cpu") and "timed against torch eager" in instruction(task, "cuda")


def _failed(verdict: Verdict, **fields: object) -> Outcome:
    fault = Fault.INFRA if verdict is Verdict.INFRA_FAULT else Fault.POLICY
    return Outcome("math/softmax", verdict, Stage.CORRECT, "cpu", "contract", fault, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("verdict", [v for v in Verdict if v is not Verdict.CORRECT])
def test_every_verdict_names_the_stage_the_reason_and_a_remedy(verdict: Verdict) -> None:
    lines = feedback(_failed(verdict, message="line 7: this went wrong")).splitlines()
    assert verdict in lines[0] and "correct" in lines[0] and "line 7" in lines[1]
    assert len(lines) == 3 and lines[2].endswith((".", "hidden."))


def test_failures_violations_and_builds_are_named() -> None:
    text = feedback(_failed(
        Verdict.INCORRECT, cases=Cases(3, 5, (CaseFailure("M=3 N=5", "off by 12 times the tolerance"),)),
        violations=(Violation("denied_op", "aten.add"),),
        compile=(Build("k", "sm_90", False, "out of resource: shared memory"), Build("k", "sm_80", True)),
    ))  # fmt: skip
    for part in ("3 of 5", "M=3 N=5", "12 times", "aten.add", "sm_90", "shared memory"):
        assert part in text
    assert "sm_80" not in text


def test_long_feedback_is_cut() -> None:
    outcome = _failed(Verdict.RUNTIME_ERROR, message="x" * 100_000)
    assert len(feedback(outcome)) == 4000 and len(feedback(outcome, 500)) == 500
    assert feedback(outcome).endswith("the line refers to your source."), "what to do is never cut"
    assert len(feedback(outcome, 10)) == 10


def test_a_solved_task_reads_speed_and_traffic() -> None:
    timing = Timing(1.5, 1.4, 1.6, None, (CaseTime("n=4", 3.0, 2.0, 1.5, 1.4, 1.6, 100),), "H200")
    text = feedback(Outcome(
        "math/softmax", Verdict.CORRECT, Stage.TIME, "cuda", "contract", cases=Cases(5, 5), timing=timing,
        evidence=Evidence(2, True, moved_bytes=200, ideal_bytes=100),
    ))  # fmt: skip
    assert "1.500" in text and "1.400 to 1.600" in text and "200" in text and "100" in text


def test_the_first_failure_is_not_told_twice() -> None:
    cases = Cases(3, 4, (CaseFailure("M=3", "off by 12"),))
    assert feedback(_failed(Verdict.INCORRECT, message="M=3: off by 12", cases=cases)).count("off by 12") == 1
