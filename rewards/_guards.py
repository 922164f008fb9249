"""The conditions that every partial credit checks first."""

from __future__ import annotations

from kbx_env.outcome import Outcome, Verdict

_UNREAD = (Verdict.MALFORMED, Verdict.REJECTED, Verdict.INFRA_FAULT)
"""Verdicts of submissions whose cases do not count, whatever they are."""


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


def attempted(outcome: Outcome) -> bool:
    """Check that the cases that a submission passed count, also where an error or the time limit ended it afterwards.

    Args:
        outcome: the graded submission.

    Returns:
        True if at least one kernel was launched, no rule was broken and no torch operator was denied.
    """
    if outcome.violations or outcome.verdict in _UNREAD:
        return False
    return outcome.evidence is not None and outcome.evidence.launches > 0 and not outcome.evidence.denied_ops


def passes(outcome: Outcome) -> float:
    """Return the share of telling cases that passed and count (``attempted``), in [0, 1]; cases that were not run did not pass."""
    cases = outcome.cases
    if not attempted(outcome) or cases is None or not cases.telling:
        return 0.0
    return (cases.telling_passed or 0) / cases.telling
