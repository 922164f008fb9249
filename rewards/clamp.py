"""Reward term: quantized integers stay in range."""

from kbx_env.rewards._stages import held
from kbx_env.rewards._term import term

from kbx_env.outcome import Outcome


@term(0.0, 1.0)
def clamp(outcome: Outcome) -> float | None:
    """Pays the share of operands at the scheme's scales whose integers are in its symmetric range; wrong cases only."""
    return held(outcome, "clamp")
