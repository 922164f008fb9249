"""Reward term: no intermediate tensors."""

from kbx_env.rewards._passing import in_passing
from kbx_env.rewards._term import term

from kbx_env.outcome import Outcome


@term(0.0, 1.0)
def intermediates(outcome: Outcome) -> float | None:
    """Pays the share of moved bytes that are arguments' or results', in telling cases that passed, times their share.

    Bytes through a pointer that was loaded from memory cannot be attributed to a tensor and count as an intermediate's.

    Args:
        outcome: the graded submission.

    Returns:
        A number in [0, 1]; ``None`` where the CPU tier has not executed the kernel.
    """
    return in_passing(outcome, lambda p: 1.0 - p.between_bytes / p.moved_bytes)
