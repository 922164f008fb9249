"""Attempts: what is tried again, how often, and what the outcome says of it."""

from __future__ import annotations

import pytest

from kbx_env.executor.direct import final, retrying
from kbx_env.outcome import Cases, Fault, FaultKind, Outcome, Stage, Verdict


def _lost(kind: FaultKind | None, message: str = "gone") -> Outcome:
    return Outcome("t", Verdict.INFRA_FAULT, Stage.COMPILE, "cpu", "contract", Fault.INFRA, message, fault_kind=kind)


RIGHT = Outcome("t", Verdict.CORRECT, Stage.EVIDENCE, "cpu", "contract", cases=Cases(1, 1), manifest={"device": "cpu"})
WRONG = Outcome("t", Verdict.INCORRECT, Stage.CORRECT, "cpu", "contract", Fault.POLICY, "unsupported values")


@pytest.mark.parametrize("kind", [None, *FaultKind])
def test_the_kind_of_a_fault_decides_on_another_attempt_and_its_message_does_not(kind: FaultKind | None) -> None:
    replies = [_lost(kind, "unsupported, says the message"), RIGHT]
    outcome = retrying(lambda: replies.pop(0))()
    if kind is FaultKind.UNSUPPORTED:
        assert outcome.fault_kind is kind and outcome.manifest["attempt"] == 1
    else:
        assert outcome.correct and outcome.manifest["attempt"] == 2
        assert outcome.manifest["faults"] == ["unsupported, says the message"] and outcome.manifest["device"] == "cpu"


def test_a_verdict_is_final_and_attempts_end() -> None:
    asked: list[int] = []

    def lost() -> Outcome:
        asked.append(1)
        return _lost(FaultKind.SANDBOX)

    outcome = retrying(lost, attempts=3)()
    assert len(asked) == 3 and outcome.masked and outcome.manifest["attempt"] == 3
    assert outcome.manifest["faults"] == ["gone", "gone"]
    assert final(WRONG) and retrying(lambda: WRONG)().manifest == {"attempt": 1}


def test_only_an_infrastructure_fault_has_a_kind() -> None:
    with pytest.raises(ValueError, match="fault kind"):
        Outcome("t", Verdict.INCORRECT, Stage.CORRECT, "cpu", "contract", Fault.POLICY, fault_kind=FaultKind.SANDBOX)
    for kind in FaultKind:
        assert Outcome.from_dict(_lost(kind).to_dict()) == _lost(kind)
    old = _lost(None).to_dict()
    del old["fault_kind"]
    assert Outcome.from_dict(old).fault_kind is None
