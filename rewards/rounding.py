"""Reward term: quantization rounding."""

from kbx_env.rewards._stages import held
from kbx_env.rewards._term import term

from kbx_env.outcome import Outcome


@term(0.0, 1.0)
def rounding(outcome: Outcome) -> float | None:
    """Pays the share of quantized operands that are rounded as the scheme states, at its scales; wrong cases only."""
    return held(outcome, "rounding")
