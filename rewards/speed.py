"""Reward term: speedup over eager, beyond the noise."""

import math

from kbx_env.rewards._term import term

from kbx_env.outcome import Outcome

CAP = 4.0
"""log2 of the largest speedup that is paid (16x)."""


@term(0.0, CAP, ("cuda",))
def speed(outcome: Outcome) -> float | None:
    """Pays log2 of the lower bound of the speedup, capped by the physical floor; ``None`` where nothing was timed.

    A kernel whose interval contains 1 is inside the noise and earns 0, as a slower kernel does.

    Args:
        outcome: the graded submission.

    Returns:
        log2 of the speedup over eager, in [0, ``CAP``]; 0 for a wrong kernel; ``None`` where nothing was timed, and
        where a time is faster than physically possible (``void``), which masks the whole outcome.
    """
    if not outcome.correct:
        return 0.0
    if outcome.timing is None or outcome.timing.void:
        return None
    low = outcome.timing.low
    if outcome.timing.floor_ratio is not None:
        low = min(low, outcome.timing.floor_ratio)
    return min(CAP, math.log2(low)) if low > 1.0 else 0.0
