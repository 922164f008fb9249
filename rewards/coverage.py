"""Reward term: how much of the result fused kernels stored."""

from kbx_env.rewards._passing import in_passing
from kbx_env.rewards._term import term

from kbx_env.outcome import Outcome


@term(0.0, 1.0)
def coverage(outcome: Outcome) -> float | None:
    """Pays the share of the results that Triton stored without intermediates, in telling cases that passed, times their share.

    ``Evidence.stored_share`` is the share of the results' elements that a Triton store wrote. It is multiplied by the share of
    the moved bytes that belong to arguments and results: bytes of intermediate tensors were moved by kernels that are not fused.

    Args:
        outcome: the graded submission.

    Returns:
        A number in [0, 1]; ``None`` where the CPU tier has not executed the kernel.
    """
    stored = outcome.evidence.stored_share if outcome.evidence is not None else None
    fused = in_passing(outcome, lambda p: 1.0 - p.between_bytes / p.moved_bytes)
    if fused == 0.0:
        return 0.0
    return None if fused is None or stored is None else fused * min(1.0, max(0.0, stored))
