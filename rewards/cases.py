"""Reward term: the share of correctness cases passed."""

from kbx_env.rewards._guards import earnest
from kbx_env.rewards._term import term

from kbx_env.outcome import Outcome


@term(0.0, 1.0)
def cases(outcome: Outcome) -> float:
    """Pays the share of telling cases passed, nothing once a rule is broken or nothing was launched.

    A case whose result is empty or all zeros is passed by doing nothing; it is not a telling case and pays nothing. A
    submission that stops half-way (crash, timeout) earns nothing, because its remaining cases are unknown.

    Args:
        outcome: the graded submission.

    Returns:
        The share, in [0, 1].
    """
    if not earnest(outcome) or outcome.cases is None:
        return 0.0
    if outcome.cases.telling_passed is None or not outcome.cases.telling:
        return 0.0
    return outcome.cases.telling_passed / outcome.cases.telling
