"""Reward term: estimated nearness to the roofline, on a machine without a GPU."""

import math

from kbx_env.rewards._term import term

from kbx_env.outcome import Outcome

DECADES = 2.0
"""A share of the roofline below 10 ** -DECADES earns nothing."""


@term(0.0, 1.0, ("cpu",))
def estimated(outcome: Outcome) -> float | None:
    """Pays 1 at the estimated roofline, 0 at a hundredth of it, evenly in between on a logarithmic scale.

    The cost model's estimate is not a measurement: it can order the attempts of one policy at one task, not compare
    policies.

    Args:
        outcome: the graded submission.

    Returns:
        A number in [0, 1]: 1 + log10(share of the roofline) / ``DECADES``, clamped; 0 for a wrong kernel; ``None``
        where nothing was estimated.
    """
    if not outcome.correct:
        return 0.0
    if outcome.estimate is None:
        return None
    return min(1.0, max(0.0, 1.0 + math.log10(outcome.estimate.estimated_share) / DECADES))
