"""Reward term: signal-to-noise margin."""

from kbx_env.rewards._stages import held
from kbx_env.rewards._term import term

from kbx_env.outcome import Outcome


@term(0.0, 1.0)
def margin(outcome: Outcome) -> float | None:
    """Pays the noise of the scheme over the deviation from it, 0 dB (no scheme at all) to 40 dB; wrong cases only."""
    return held(outcome, "margin")
