"""Reward term: a milestone of speed over torch.compile."""

from kbx_env.rewards._term import term
from kbx_env.rewards.milestone_eager import LEAST

from kbx_env.outcome import Outcome


@term(0.0, 1.0, ("cuda",))
def milestone_compiled(outcome: Outcome) -> float | None:
    """Pays 1 for a correct kernel that is at least 5 % faster than eager and than torch.compile.

    The speedup over torch.compile is the speedup over eager times a ratio that is kept for each task and machine
    (docs/decisions/0018-compiled-baseline.md). Both sides of the milestone use the lower end of the speedup's interval.

    Args:
        outcome: the graded submission.

    Returns:
        1 or 0; ``None`` where nothing was timed, where a time is faster than physically possible (``void``), and where
        torch.compile has no time (it was not asked for, or could not compile the reference).
    """
    if not outcome.correct:
        return 0.0
    timing = outcome.timing
    if timing is None or timing.void or timing.compiled_speedup is None:
        return None
    beside_compiled = timing.compiled_speedup * timing.low / timing.speedup
    return 1.0 if min(timing.low, beside_compiled) >= LEAST else 0.0
