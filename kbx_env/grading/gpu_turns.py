"""Points at which work that shares a GPU lets a grading measure alone.

A grading that wants the GPU for itself waits until every other one has released it. Judging a large result takes up to
seconds, and most of them are free of danger between two operations. So the judges and the reference call ``yield_gpu``
there; it costs microseconds, and does nothing on a CPU or while nobody waits.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Protocol


class SharedHold(Protocol):
    """A shared use of the GPU lock, of this thread."""

    def give_way(self) -> None:
        """Release the GPU and take it again, if a grading waits to have it alone and may have it now."""


_HOLD: ContextVar[SharedHold | None] = ContextVar("shared hold of the GPU", default=None)


@contextlib.contextmanager
def holding(hold: SharedHold) -> Iterator[None]:
    """Make a hold known to ``yield_gpu`` within the block."""
    token = _HOLD.set(hold)
    try:
        yield
    finally:
        _HOLD.reset(token)


def yield_gpu() -> None:
    """Let a grading measure alone that waits for it, if this thread shares the GPU. No result depends on it."""
    hold = _HOLD.get()
    if hold is not None:
        hold.give_way()
