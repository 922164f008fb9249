"""What every partial credit asks of an outcome first."""

from __future__ import annotations

from kbx_env.outcome import Outcome, Verdict


def earnest(outcome: Outcome) -> bool:
    """Whether all cases ran, something was launched, no rule was broken and nothing was denied.

    A constant, or a copy of an input, breaks a rule or passes no telling case; terms ask for telling cases, or for what the
    grader saw of the work itself.
    """
    if outcome.violations or outcome.verdict not in (Verdict.CORRECT, Verdict.INCORRECT):
        return False
    return outcome.evidence is not None and outcome.evidence.launches > 0 and not outcome.evidence.denied_ops
