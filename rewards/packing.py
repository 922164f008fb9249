"""Reward term: packed operands."""

from kbx_env.rewards._stages import held
from kbx_env.rewards._term import term

from kbx_env.outcome import Outcome


@term(0.0, 1.0)
def packing(outcome: Outcome) -> float | None:
    """Pays the share of operands in cases whose result is made of as many unpacked bytes as demanded; wrong cases only."""
    return held(outcome, "packing")
