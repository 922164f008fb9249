"""Reward term: few launches."""

from kbx_env.rewards._passing import in_passing
from kbx_env.rewards._term import term

from kbx_env.outcome import Outcome

LEAST = 1
"""The minimum number of launches that holds for every task; some tasks need more."""


@term(0.0, 1.0)
def launches(outcome: Outcome) -> float | None:
    """Pays the least launches divided by the launches of a call, in telling cases that passed, times their share."""
    return in_passing(outcome, lambda p: LEAST * p.cases / p.launches)
