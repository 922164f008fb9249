"""Reward term: packed operands."""

from kbx_env.rewards._stages import held
from kbx_env.rewards._term import term

from kbx_env.outcome import Outcome


@term(0.0, 1.0)
def packing(outcome: Outcome) -> float | None:
    """Pays the share of operands in cases whose result uses as many unpacked bytes as required; wrong cases only."""
    return held(outcome, "packing")
