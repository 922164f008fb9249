"""The condition that every partial credit checks first."""

from __future__ import annotations

from kbx_env.outcome import Outcome, Verdict


def earnest(outcome: Outcome) -> bool:
    """Check that a submission is eligible for partial credit.

    A constant, or a copy of an input, breaks a rule or passes no telling case. The terms therefore count telling cases
    only, or work that the grader observed itself.

    Args:
        outcome: the graded submission.

    Returns:
        True if all cases ran, at least one kernel was launched, no rule was broken and no torch operator was denied.
    """
    if outcome.violations or outcome.verdict not in (Verdict.CORRECT, Verdict.INCORRECT):
        return False
    return outcome.evidence is not None and outcome.evidence.launches > 0 and not outcome.evidence.denied_ops
