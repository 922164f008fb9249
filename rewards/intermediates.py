"""Reward term: no intermediate tensors."""

from kbx_env.rewards._passing import in_passing
from kbx_env.rewards._term import term

from kbx_env.outcome import Outcome


@term(0.0, 1.0)
def intermediates(outcome: Outcome) -> float | None:
    """Pays the share of the moved bytes that go to or from arguments and results, in telling cases that passed, times their share.

    Bytes through a pointer that nobody can follow (out of a table in memory) count as an intermediate's.
    """
    return in_passing(outcome, lambda p: 1.0 - p.between_bytes / p.moved_bytes)
