"""Reward term: steps of a fused operation."""

from kbx_env.rewards._stages import held
from kbx_env.rewards._term import term

from kbx_env.outcome import Outcome


@term(0.0, 1.0)
def operators(outcome: Outcome) -> float | None:
    """Pays the share of the fused operation's steps whose values the launches compute; wrong cases only."""
    return held(outcome, "operators")
