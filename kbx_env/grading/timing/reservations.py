"""Memory of the GPU that the steps of timing a kernel take: it is reserved, so that no grading takes it from others."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

import torch

from kbx_env.device.driver import KEPT_BYTES, give_back, preallocate
from kbx_env.errors import SandboxError
from kbx_env.grading.runtime.session import RunnerSession
from kbx_env.grading.runtime.untrusted import GradingAborted
from kbx_env.grading.timing import gpu_lock

COUNT_MEMORY, MEASURE_MEMORY, JUDGE_MEMORY = 10, 24, 12
"""Device memory reserved for each step of timing a case, in multiples of the bytes of its inputs (judging a large case took
up to 35 on an H100, most of them less; work that needs more is repeated with more): evaluating the
reference to count its work; measuring (for each contestant two draws, three slots, and space to move them); judging.
Compiling keeps the inputs once and reserves no memory: a compiler may take minutes, and the next large reservation
would keep all others waiting behind it."""
MORE_MEMORY, MEMORY_SLACK = 4, 2.0
"""Work whose memory was not enough is repeated with so many times as much. Torch may allocate ``MEMORY_SLACK`` times what
is reserved: its allocator rounds up and keeps gaps, and graders use less than they reserve most of the time."""
MEMORY_ATTEMPTS, MEASURE_ATTEMPTS, MEMORY_PAUSE_SECONDS, MEMORY_WAIT_SECONDS = 4, 3, 1.0, 20.0
"""Attempts at work that has all the memory reserved that timing may reserve, and at measuring, and least and most seconds between
them, by when enough memory is free. In a pause others judge results that they hold; they cannot while all memory is reserved. With
14 workers on a GPU of 80 GB they may have to wait for seconds before they do."""
FREE_SHARE = 0.8
"""Share of the free device memory for work that has all the memory reserved that timing may reserve. On a GPU of 80 GB
judging one GiB of inputs needs 22 GiB, almost twice that memory; the rest is for who measures."""
CONTEXT_BYTES = 900 << 20
"""Device memory of each process for its CUDA context and the kernels that torch loads (0.8 to 1 GiB on an H100, with two
hardware queues). Graders and runners each have one; this memory cannot be reserved."""
SHARE = 0.5
"""Share of the device's memory for all gradings that count work or judge timed results. The grading that measures holds the GPU
alone and has the rest; for a case that needs more than that it reserves the difference. With 0.35, three gradings waited for memory
beside each that had it, on an H100 of 80 GB with 14 workers (docs/measurements)."""

_Done = TypeVar("_Done")


def with_memory(session: RunnerSession, share: float, work: Callable[[], _Done], needed: float = 0.0) -> _Done:
    """Do work, and where the GPU's memory does not last, do it again while no other grading has memory reserved.

    Memory that others hold must not count against a submission. If it is not enough without them either, it does.

    Args:
        session: of the grading.
        share: of the memory that timing may reserve, which the work needs besides its own; 0 or less for none.
        work: may be called ``MEASURE_ATTEMPTS`` times.
        needed: bytes that it may need; another attempt waits until so much is free.

    Returns:
        What the work returns.
    """
    for attempt in range(1, MEASURE_ATTEMPTS + 1):
        try:
            with session.gpu.room(share) if share > 0 else contextlib.nullcontext():
                return work()
        except (RuntimeError, GradingAborted, SandboxError) as e:  # torch.OutOfMemoryError is a RuntimeError
            if attempt == MEASURE_ATTEMPTS or not session.gpu.contended or "out of memory" not in str(e).lower():
                raise
        give_back()
        await_memory(session, needed, MEMORY_PAUSE_SECONDS if share >= 1.0 else 0.0)
        share = 1.0
    raise AssertionError("unreachable")


def await_memory(session: RunnerSession, needed: float, least: float) -> None:
    """Wait until so much memory of the device is free, for at most ``MEMORY_WAIT_SECONDS``.

    Args:
        session: of the grading; its ``waited`` grows.
        needed: bytes; for more than ``FREE_SHARE / 2`` of the device nobody waits, because contexts may take the rest.
        least: seconds that are waited in any case, for others to judge what they hold.
    """
    began = time.monotonic()
    if least:
        time.sleep(least)
    if not torch.cuda.is_available():
        return
    needed = min(needed, FREE_SHARE / 2 * torch.cuda.get_device_properties(0).total_memory)
    while free_bytes() < needed and time.monotonic() - began < MEMORY_WAIT_SECONDS:
        time.sleep(0.1)
    session.gpu.waited += time.monotonic() - began


def reservable(total: int, others: int | None, contexts: int) -> int:
    """Return how much memory of a device all gradings together may reserve.

    Args:
        total: bytes of the device.
        others: bytes that processes beside the gradings hold, such as a trainer on the same GPU; ``None`` if not known.
        contexts: processes of gradings on the device.

    Returns:
        Bytes: what others leave, without the contexts and what graders keep for themselves, but at least half of it.
    """
    left = total - (others or 0)
    return max(left // 2, left - (CONTEXT_BYTES + KEPT_BYTES) * contexts)


class Reservations:
    """Runs work that needs device memory within a reservation, so that it takes no memory from other gradings.

    Args:
        session: of the grading.
        memory: bytes of the device without the contexts of its processes.

    Attributes:
        peak_bytes: most memory that torch had for the latest work; 0 without a device.
    """

    def __init__(self, session: RunnerSession, memory: int) -> None:
        self._session, self._shared_bytes = session, SHARE * memory
        self.peak_bytes = 0
        self._likely = 0.0

    def preallocate(self) -> None:
        """Ask the driver at once for what the work of ``run`` is likely to need. For the work to call, while it shares the GPU."""
        if self._likely:
            preallocate(int(self._likely))
            if torch.cuda.is_available():
                torch.cuda.reset_peak_memory_stats()  # it was not needed yet

    def run(self, needed: float, work: Callable[[], _Done], likely: float = 0.0) -> _Done:
        """Do work on the GPU, and give its memory back. Work that needs more memory than expected is repeated with more.

        Args:
            needed: bytes that it is expected to need at most.
            work: may be called several times.
            likely: bytes that it is likely to need, for ``preallocate``: each request to the driver waits for a lock of the host.

        Returns:
            What the work returns.
        """
        sizes = [size for size in (needed, MORE_MEMORY * needed) if size < self._shared_bytes]
        sizes += [self._shared_bytes] * MEMORY_ATTEMPTS
        for k, size in enumerate(sizes):
            with self._session.gpu.room(size / self._shared_bytes):
                try:
                    free = FREE_SHARE * free_bytes() if size == self._shared_bytes else 0.0
                    with limited(max(free, MEMORY_SLACK * max(size, gpu_lock.UNRESERVED * self._shared_bytes))), self._counted():
                        # A process keeps little anyway, and nothing of more is asked for than is reserved.
                        self._likely = likely if KEPT_BYTES < likely <= size else 0.0
                        return work()
                except torch.OutOfMemoryError:
                    if k == len(sizes) - 1:
                        raise
                finally:
                    give_back(KEPT_BYTES)
            if size == self._shared_bytes:
                # Others hold results that they could not judge while all memory was reserved here.
                await_memory(self._session, needed / FREE_SHARE, MEMORY_PAUSE_SECONDS)
        raise AssertionError("unreachable")

    @contextlib.contextmanager
    def _counted(self) -> Iterator[None]:
        """Set ``peak_bytes`` to what the block takes."""
        if not torch.cuda.is_available():
            yield
            return
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        yield
        self.peak_bytes = torch.cuda.max_memory_allocated() - before


def free_bytes() -> int:
    """Return the free memory of the device; 0 without one."""
    return int(torch.cuda.mem_get_info()[0]) if torch.cuda.is_available() else 0


@contextlib.contextmanager
def limited(more: float) -> Iterator[None]:
    """Let torch ask the device for at most so many bytes more within the block; libraries then use less workspace.

    Args:
        more: bytes.
    """
    if not torch.cuda.is_available():
        yield
        return
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, (torch.cuda.memory_reserved() + more) / total))
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
