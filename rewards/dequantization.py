"""Reward term: the result is scaled back to the unquantized result's units."""

from kbx_env.rewards._stages import held
from kbx_env.rewards._term import term

from kbx_env.outcome import Outcome


@term(0.0, 1.0)
def dequantization(outcome: Outcome) -> float | None:
    """Pays cases whose result has the unquantized units, with at most 10 dB more noise than the scheme; wrong cases only."""
    return held(outcome, "dequantization")
