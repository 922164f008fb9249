"""Reward term: few bytes moved."""

from kbx_env.rewards._passing import in_passing
from kbx_env.rewards._term import term

from kbx_env.outcome import Outcome


@term(0.0, 1.0)
def traffic(outcome: Outcome) -> float | None:
    """Pays ideal over moved bytes (as requested, without caches), in telling cases that passed, times their share."""
    return in_passing(outcome, lambda p: p.ideal_bytes / p.moved_bytes)
