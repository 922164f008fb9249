"""Reward term: estimated nearness to the roofline, on a machine without a GPU."""

import math

from kbx_env.rewards._term import term

from kbx_env.outcome import Outcome

DECADES = 2.0
"""Shares of the roofline below 10 to the minus this earn nothing."""


@term(0.0, 1.0, ("cpu",))
def estimated(outcome: Outcome) -> float | None:
    """Pays 1 at the estimated roofline, 0 at a hundredth of it, evenly in between on a logarithmic scale.

    ``None`` where nothing was estimated. A model's guess, not a measurement: good for ordering a policy's own
    attempts at one task, not for comparing policies.
    """
    if not outcome.correct:
        return 0.0
    if outcome.estimate is None:
        return None
    return min(1.0, max(0.0, 1.0 + math.log10(outcome.estimate.estimated_share) / DECADES))
