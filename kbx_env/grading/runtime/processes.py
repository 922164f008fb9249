"""The long-lived processes of a grader: the warm zygote and the pool of runners that it has forked ahead of need."""

from __future__ import annotations

import threading

from kbx_env.grading.runtime.compiler_client import CompilerMaker, KernelCompiler
from kbx_env.grading.runtime.runner_pool import RunnerPool
from kbx_env.grading.runtime.zygote_client import Zygote
from kbx_env.grading.runtime.zygote_process import ZygoteProcess


class SandboxProcesses:
    """Starts the zygote on first use, and again when it has died. Thread-safe.

    Args:
        started: the process of the first zygote, which gets warm already.

    Attributes:
        runner_pool: runners that have seen no submission yet.
        compilers: makes the compiler of a submission's kernels, a new one for every grading by default.
    """

    def __init__(self, started: ZygoteProcess | None = None) -> None:
        self._started = started
        self._zygote: Zygote | None = None
        self._lock = threading.Lock()
        self.runner_pool = RunnerPool()
        self.compilers: CompilerMaker = KernelCompiler

    def zygote(self) -> Zygote:
        """Start the zygote if there is none that lives.

        Returns:
            The warm zygote.

        Raises:
            SandboxError: it does not start.
        """
        with self._lock:  # gradings in other threads share it
            if self._zygote is not None and not self._zygote.alive:
                self._zygote.close()
                self._zygote = None
            if self._zygote is None:
                started, self._started = self._started, None
                self._zygote = Zygote(started)
            return self._zygote

    def start(self) -> None:
        """Start the process of a zygote if there is none, without waiting for it.

        Raises:
            SandboxError: it does not start.
        """
        with self._lock:
            if self._zygote is None and self._started is None:
                self._started = ZygoteProcess()

    def close(self) -> None:
        """End all processes; the next use starts new ones."""
        with self._lock:
            zygote, self._zygote = self._zygote, None
            started, self._started = self._started, None
            pool, self.runner_pool = self.runner_pool, RunnerPool()
        pool.close()
        for process in (zygote, started):
            if process is not None:
                process.close()
