"""Speculative compiling: a submission is loaded for the GPU, and its kernels are compiled, while the CPU tier still proves it.

Who waits for one verdict waits for two things that do not need each other: the proof, which takes one core, and the compilers.
Where cores are busy the work is not begun: a kernel that the proof refuses has no use for it.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch

from kbx_env.grading.record import OutcomeBuilder

IDLE_SHARE = 0.25
"""Share of the cores that may be busy where kernels are compiled beside the proof. A wrong kernel costs a runner and its CUDA
context then, which a GPU with many workers has no time for: of 16 cores these keep 9 busy."""


class SpeculativeCompile:
    """The compile stage of a grading, in a thread, before it is known whether its proof succeeds.

    Args:
        builder: of the grading's outcome.
        work: what the thread does. An error that it raises is raised by ``finish``.
        give_up: makes ``work`` end soon.
    """

    def __init__(self, builder: OutcomeBuilder, work: Callable[[], None], give_up: Callable[[], None]) -> None:
        self._builder, self._work, self._give_up = builder, work, give_up
        self._error: BaseException | None = None
        self._seconds = dict(builder.seconds)
        self._thread = threading.Thread(target=self._run, name="speculative-compile", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            torch.set_num_threads(1)
            self._work()
        except BaseException as e:
            self._error = e

    def _join(self) -> None:
        self._thread.join()
        # What was done beside the proof took none of the grading's time.
        self._builder.seconds = dict(self._seconds)
        if self._builder.gpu is not None:
            self._builder.gpu.waited = 0.0

    def await_end(self) -> float:
        """Wait for the thread.

        Returns:
            Seconds waited.
        """
        began = time.perf_counter()
        self._join()
        return time.perf_counter() - began

    def finish(self) -> None:
        """Raise what the work has raised, after ``await_end``."""
        if self._error is not None:
            raise self._error

    def abandon(self) -> None:
        """End the work and the thread: the proof has failed, or could not be made."""
        self._give_up()
        self._join()


def cores_are_idle() -> bool:
    """Return whether at most ``IDLE_SHARE`` of this process's cores is busy now; false where the system does not tell."""
    try:
        running = int(Path("/proc/loadavg").read_text().split()[3].partition("/")[0])
        return 1 <= running <= IDLE_SHARE * len(os.sched_getaffinity(0))
    except (OSError, ValueError, IndexError):
        return False
