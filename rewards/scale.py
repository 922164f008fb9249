"""Reward term: quantization scales."""

from kbx_env.rewards._stages import held
from kbx_env.rewards._term import term

from kbx_env.outcome import Outcome


@term(0.0, 1.0)
def scale(outcome: Outcome) -> float | None:
    """Pays the share of quantized operands that have the scheme's scales, whatever the rounding; wrong cases only."""
    return held(outcome, "scale")
