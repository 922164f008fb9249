"""Reward term: units of the result."""

from kbx_env.rewards._stages import held
from kbx_env.rewards._term import term

from kbx_env.outcome import Outcome


@term(0.0, 1.0)
def dequantization(outcome: Outcome) -> float | None:
    """Pays cases whose result, made as demanded, has the unquantized one's units: at most 10 dB more noise; wrong cases only."""
    return held(outcome, "dequantization")
