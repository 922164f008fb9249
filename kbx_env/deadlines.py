"""Time limits of gradings: for the submission, for compilers, and for an attempt before it counts as lost."""

from __future__ import annotations

WALL = 30.0
"""Default wall limit of a submission in seconds, over all stages but timing."""
COMPILE_SECONDS = 60.0
"""Seconds for compiling the kernels that calls will launch, in addition to the wall limit. A submission may have a kernel for each
case, and the time that compilers take depends on the load of the machine."""
LOAD = 4.0
"""How many times slower than its CPU time a process of the grader may run on a loaded machine before it counts as lost."""
MORE_SECONDS = 600.0
"""Further seconds for an attempt that also times torch.compile, its wait until other processes have compiled included."""
_LEAST = 180.0
"""Least deadline of an attempt in seconds: a worker may still be warming up on a busy machine."""
_TIMED = 600.0
"""Least deadline of an attempt with timing in seconds: timing a slow kernel on every case may take minutes."""


def deadline_of(timed: bool, wall: float = WALL, compiled: bool = False) -> float:
    """Choose the deadline of an attempt. It is longer than any honest grading takes, so a later attempt counts as lost.

    Args:
        timed: whether kernels are timed.
        wall: wall limit of the submission in seconds.
        compiled: whether torch.compile is timed too.

    Returns:
        Seconds.
    """
    return max(_TIMED if timed else _LEAST, COMPILE_SECONDS + LOAD * wall) + (MORE_SECONDS if compiled else 0.0)
