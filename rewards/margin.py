"""Reward term: signal-to-noise margin."""

from kbx_env.rewards._stages import held
from kbx_env.rewards._term import term

from kbx_env.outcome import Outcome


@term(0.0, 1.0)
def margin(outcome: Outcome) -> float | None:
    """Pays how far the deviation from the scheme lies below its own noise, 0 dB (no scheme at all) to 40 dB; wrong cases only."""
    return held(outcome, "margin")
