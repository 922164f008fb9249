"""What a policy reads: the whole contract, and feedback that helps, is bounded and gives no input away."""

from __future__ import annotations

import pytest

from kbx_env.envs.prompt import explained, feedback, instruction
from kbx_env.grading.static.aliases import MODULES
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


def test_the_rules_name_every_module_that_may_be_imported_and_what_may_be_converted() -> None:
    text = instruction(load_task("activation/gelu_int8"), "cpu")
    rules = text.split("Rules\n")[1]
    for module in MODULES - {"__future__"}:
        root, _, rest = module.partition(".")
        assert (f".{rest}" if root in ("torch", "triton") and rest else root) in rules, module
    assert "from triton.language.extra import libdevice" in rules and "slices" in rules
    assert "arange" in rules and "as it was passed, to a float type" in rules
    assert max(map(len, rules.split("\n\n")[0].splitlines()[1:])) <= 132


def test_a_late_error_names_the_case_and_how_many_were_not_run() -> None:
    cases = Cases(14, 18, stopped_at=15, stopped_in="M=1 N=5 x transposed [x (1, 5) with strides (1, 1)]")
    text = feedback(_failed(Verdict.COMPILE_ERROR, message="line 8: CompilationError: ...", cases=cases))
    assert "Stopped at case 15 of 18, 3 not run: M=1 N=5 x transposed [x (1, 5) with strides (1, 1)]" in text
    assert cases.wrong == 0


def test_what_is_cut_is_counted_and_strides_are_shown() -> None:
    failures = tuple(CaseFailure(f"n={k}", "off", "x (2, 3) with strides (1, 2)" if k == 0 else "") for k in range(8))
    text = feedback(_failed(
        Verdict.INCORRECT, cases=Cases(1, 16, failures), violations=tuple(Violation("r", str(k)) for k in range(7)),
        compile=tuple(Build("k", f"sm_{k}", False, "bad", specialisation="n i32, B=4") for k in range(6)),
    ))  # fmt: skip
    assert "- n=0 [x (2, 3) with strides (1, 2)]: off" in text and "- n=1: off" in text
    assert "- and 7 more failed cases" in text and "... and 2 more rules broken" in text
    assert "... and 2 more failed builds" in text and "k for sm_0 (n i32, B=4): bad" in text


def test_tf32_is_named_where_products_ran_in_it() -> None:
    cases = Cases(1, 2, (CaseFailure("M=3", "off by 12"),))
    wrong = _failed(Verdict.INCORRECT, cases=cases, evidence=Evidence(2, dots=("tf32",)))
    assert 'input_precision="ieee"' in feedback(wrong)
    assert "TF32" not in feedback(_failed(Verdict.INCORRECT, cases=cases, evidence=Evidence(2, dots=("f32*f32->f32",))))


def test_a_constant_that_triton_made_of_an_argument_is_explained() -> None:
    message = (
        "line 8: CompilationError: AttributeError: 'int' object has no attribute 'to' (in kernel _k, launched in line 20)\n"
        "    v = v * stride.to(tl.int64)\n            ^\n"
        "The specialisation of _k that failed: x *fp32, n=1 (made a constant), stride=1 (made a constant), B=256"
    )
    text = explained(message)
    assert "equals 1" in text and "n=1, stride=1" in text and "tl.cast(stride, tl.int64)" in text
    assert 'do_not_specialize=["stride"]' in text and text in feedback(_failed(Verdict.COMPILE_ERROR, message=message))
    assert explained("line 3: AttributeError: 'int' object has no attribute 'to'") == "", "host code has no such constants"
