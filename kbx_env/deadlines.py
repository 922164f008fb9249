"""How long gradings may take: what a submission has, what compilers have beside it, and when an attempt counts as lost."""

from __future__ import annotations

WALL = 30.0
"""Seconds that a submission has by default, over all stages but timing."""
COMPILE_SECONDS = 60.0
"""Of compiling what calls will launch, beside the wall limit: a kernel for each case is honest, and how long compilers take is
a matter of who else is at work."""
MORE_SECONDS = 600.0
"""For torch.compile, when it is to be told of, and for standing in line until others have compiled."""
_LEAST = 180.0
"""It covers a worker that is still getting warm on a busy machine, whatever the submission itself may take."""
_TIMED = 600.0
"""Timing a slow kernel on every case is allowed to take minutes."""


def deadline_of(timed: bool, wall: float = WALL, compiled: bool = False) -> float:
    """Seconds after which an attempt at a grading counts as lost by the machine; no honest grading takes as long.

    Args:
        timed: whether kernels are timed.
        wall: seconds of the submission's own.
        compiled: whether torch.compile is timed too.
    """
    return max(_TIMED if timed else _LEAST, COMPILE_SECONDS + 4 * wall) + (MORE_SECONDS if compiled else 0.0)
