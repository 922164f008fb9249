"""An Outcome that cannot lie, and survives JSON."""

from __future__ import annotations

import json

import pytest

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

TIMING = Timing(
    2.0, 1.9, 2.1, None, (CaseTime("N=4", 10.0, 5.0, 2.0, 1.9, 2.1, 40, disturbed=True),), "H200", {"sm_mhz": 1980}, None,
    ("a note",),
)  # fmt: skip


def _correct(**more) -> Outcome:
    return Outcome("math/softmax", Verdict.CORRECT, Stage.EVIDENCE, "cpu", "contract", cases=Cases(3, 3), **more)


def test_json_both_ways() -> None:
    whole = _correct(
        timing=TIMING, compile=(Build("k", "sm_90", True, registers=32),), seconds={"screen": 0.1},
        evidence=Evidence(4, True, ("add",), 100, None), manifest={"torch": "2"},
    )  # fmt: skip
    assert Outcome.from_dict(json.loads(whole.to_json())).to_dict() == whole.to_dict()
    failed = Outcome(
        "a/b", Verdict.REJECTED, Stage.EVIDENCE, "cpu", "contract", Fault.POLICY, "no", Cases(1, 2, (CaseFailure("c", "r"),)),
        (Violation("rule", "detail"),),
    )  # fmt: skip
    assert Outcome.from_dict(json.loads(failed.to_json())) == failed


def test_builds_of_before_warps_were_recorded_are_read() -> None:
    data = _correct(compile=(Build("k", "sm_90", True, registers=32, warps=8),)).to_dict()
    assert Outcome.from_dict(data).compile[0].warps == 8
    del data["compile"][0]["warps"]
    assert Outcome.from_dict(data).compile[0].warps is None


def test_missing_stays_missing() -> None:
    data = json.loads(_correct().to_json(reward=None))
    assert data["timing"] is None and data["speedup"] is None and data["reward"] is None


@pytest.mark.parametrize(
    "wrong",
    [
        dict(verdict=Verdict.CORRECT, fault=Fault.POLICY, cases=Cases(1, 1)),
        dict(verdict=Verdict.INCORRECT, fault=None),
        dict(verdict=Verdict.INFRA_FAULT, fault=Fault.POLICY),
        dict(verdict=Verdict.INCORRECT, fault=Fault.POLICY, timing=TIMING),
        dict(verdict=Verdict.CORRECT, cases=Cases(1, 2)),
        dict(verdict=Verdict.CORRECT, cases=Cases(2, 2), violations=(Violation("r", "d"),)),
        dict(verdict=Verdict.CORRECT),
    ],
    ids=str,
)
def test_contradictions_raise(wrong: dict) -> None:
    with pytest.raises(ValueError):
        Outcome("a/b", stage=Stage.CORRECT, backend="cpu", grading="contract", **wrong)
