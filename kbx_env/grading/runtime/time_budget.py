"""The time of one submission."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator

from kbx_env.deadlines import COMPILE_SECONDS


class TimeBudget:
    """Counts down the time of a submission, and the time that compilers have beside it.

    The runner's wall time and the engine's CPU time count: a busy grader or machine must not make a submission late. The runner
    could sleep, so its CPU time would not do.

    Args:
        wall: seconds for the submission.

    Attributes:
        wall: as given.
        left: seconds that the submission has left; negative once it is late.
        compile_left: seconds that compilers have left.
    """

    def __init__(self, wall: float) -> None:
        self.wall = self.left = wall
        self.compile_left = COMPILE_SECONDS
        self._until = math.inf

    @property
    def compile_spent(self) -> float:
        """Seconds of compiling that were not charged to the submission."""
        return COMPILE_SECONDS - self.compile_left

    def grant(self, seconds: float) -> None:
        """Give the submission more time."""
        self.left += seconds

    def restart(self, seconds: float) -> None:
        """Give the submission so many seconds from now on, whatever was left: timing has a limit of its own."""
        self.left = min(seconds, self._until - time.monotonic())

    def spend(self, seconds: float) -> None:
        """Charge the submission."""
        self.left -= seconds

    @contextlib.contextmanager
    def compiling(self) -> Iterator[None]:
        """Charge the block to the compilers as far as they have time left; the block itself charges the submission."""
        began = time.monotonic()
        try:
            yield
        finally:
            moved = min(time.monotonic() - began, self.compile_left)
            self.compile_left -= moved
            self.left += moved

    @contextlib.contextmanager
    def free(self) -> Iterator[None]:
        """Charge the submission nothing for the block, such as ahead-of-time builds that the grader asks for."""
        left = self.left
        yield
        self.left = left

    @contextlib.contextmanager
    def apart(self, seconds: float) -> Iterator[None]:
        """Charge nothing for the block, in which the submission and its compilers have so many seconds together."""
        kept = self.left, self.compile_left
        self._until = time.monotonic() + seconds
        self.left, self.compile_left = seconds, 0.0
        try:
            yield
        finally:
            self._until = math.inf
            self.left, self.compile_left = kept
