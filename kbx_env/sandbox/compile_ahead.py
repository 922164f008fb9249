"""Compiles the kernels of launches that are left out in several threads (CUDA).

A runner calls the entry function without launches, so that the kernels of the real call are compiled before the GPU is used. The
compiler releases Python's lock while it optimises, and ptxas and gcc are programs of their own: threads use several cores.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import triton
from triton.runtime._async_compile import AsyncCompileMode, FutureKernel, active_mode

MOST_THREADS = 8
SWITCH_SECONDS = 1e-4
"""Python's switch interval in a runner with a GPU, by default 5 ms. The thread that calls the entry takes its turn at Python's lock
among those that compile: calls without launches took an eighth less time on an H200 with this one."""
NICENESS = 5
"""Added to the niceness of the threads, so that concurrent measurements are not delayed."""


class _Kernel(FutureKernel):
    """A kernel that a thread compiles. If that fails, the launch that needs it compiles it again, and reports its own error.

    Args:
        finalize_compile: keeps the result for later launches.
        future: of the thread.
        compile_fn: compiles the kernel.
    """

    def __init__(self, finalize_compile: Callable[[Any], None], future: Future[Any], compile_fn: Callable[[], Any]) -> None:
        super().__init__(finalize_compile, future)
        self.kernel: Any
        self.compile_fn = compile_fn

    def result(self, ignore_errors: bool = False) -> Any:
        """Wait for the kernel.

        Args:
            ignore_errors: whether a failure gives ``None``.

        Returns:
            The kernel.
        """
        if self.kernel is None:
            failed = self.future.exception()
            if failed is not None and ignore_errors:
                return None
            kernel = self.future.result() if failed is None else self.compile_fn()
            self.finalize_compile(kernel)
            self.kernel = kernel
        return self.kernel


class CompileAhead(AsyncCompileMode):
    """The kernels that a runner compiles ahead. Errors are ignored: the launch that needs a kernel compiles it again.

    Args:
        threads: how many; by default one for each core that this process may use, at most ``MOST_THREADS``.
    """

    def __init__(self, threads: int | None = None) -> None:
        count = threads or min(MOST_THREADS, len(os.sched_getaffinity(0)))
        self._pool: Callable[[], ThreadPoolExecutor] = functools.partial(ThreadPoolExecutor, count, "compile", _give_way)
        self.executor: ThreadPoolExecutor
        super().__init__(self._pool(), ignore_errors=True)
        self._launchers: dict[str, threading.Lock] = {}

    def submit(self, key: str, compile_fn: Callable[[], Any], finalize_fn: Callable[[Any], None]) -> Any:
        """Start to compile a kernel, unless it has been started.

        Args:
            key: of the kernel in Triton's cache.
            compile_fn: compiles it.
            finalize_fn: keeps the result for launches.

        Returns:
            The future kernel.
        """
        if key not in self.future_kernels:
            future = self.executor.submit(self._compile, compile_fn)
            self.future_kernels[key] = _Kernel(finalize_fn, future, compile_fn)
        return self.future_kernels[key]

    def _compile(self, compile_fn: Callable[[], Any]) -> Any:
        """Compile a kernel and build its launcher, if it needs one of its own (``sandbox.launcher``).

        Without this the first launch of such a kernel would run gcc, while others wait for the GPU. Triton caches the launcher;
        kernels of one signature have one, which the first of them builds.

        Args:
            compile_fn: compiles the kernel.

        Returns:
            The kernel.
        """
        kernel = compile_fn()
        types = str(list(kernel.src.signature.values()))
        with self._launchers.setdefault(types, threading.Lock()), contextlib.suppress(Exception):  # the launch reports it
            triton.runtime.driver.active.launcher_cls(kernel.src, kernel.metadata)
        return kernel

    @contextlib.contextmanager
    def collecting(self) -> Iterator[None]:
        """Compile what is launched in the block in threads."""
        token = active_mode.set(self)
        try:
            yield
        finally:
            active_mode.reset(token)

    @property
    def busy(self) -> bool:
        """Whether kernels have been started that ``finish`` has not waited for."""
        return bool(self.future_kernels)

    def finish(self) -> None:
        """Wait until every kernel that was started is compiled, hand the kernels to Triton, and end the threads.

        Triton's hooks run now, which the submission can set: the audit hook must be armed.
        """
        kernels = list(self.future_kernels.values())
        self.future_kernels.clear()
        try:
            wait([kernel.future for kernel in kernels])
            for kernel in kernels:
                kernel.result(ignore_errors=True)
        finally:
            self.executor.shutdown()
            self.executor = self._pool()


class Pending:
    """What a launch returns whose kernel is being compiled: host code that looks at the kernel waits for it.

    Args:
        future: of Triton.
    """

    def __init__(self, future: FutureKernel) -> None:
        self._future = future

    def __getattr__(self, name: str) -> Any:
        return getattr(self._future.result(), name)

    def __getitem__(self, grid: Any) -> Any:
        return self._future.result()[grid]


def _give_way() -> None:
    """Let other threads of the machine go first; on Linux, niceness is a thread's own, and its programs inherit it."""
    thread = threading.get_native_id()
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, thread, min(19, os.getpriority(os.PRIO_PROCESS, thread) + NICENESS))
