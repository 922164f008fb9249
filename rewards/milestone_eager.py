"""Reward term: a milestone of speed over eager."""

from kbx_env.rewards._term import term

from kbx_env.outcome import Outcome

LEAST = 1.05
"""Speedup from which a kernel counts as faster: 5 %, well above the interval of a timing (3 % in training)."""


@term(0.0, 1.0, ("cuda",))
def milestone_eager(outcome: Outcome) -> float | None:
    """Pays 1 for a correct kernel that is at least 5 % faster than eager, by the lower end of the speedup's interval.

    Args:
        outcome: the graded submission.

    Returns:
        1 or 0; ``None`` where nothing was timed, and where a time is faster than physically possible (``void``).
    """
    if not outcome.correct:
        return 0.0
    if outcome.timing is None or outcome.timing.void:
        return None
    return 1.0 if outcome.timing.low >= LEAST else 0.0
