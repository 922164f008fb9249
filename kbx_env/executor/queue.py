"""The queue of the executor: waiters and their jobs, a priority queue, and a timer for deadlines."""

from __future__ import annotations

import heapq
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from kbx_env.executor.pools.process import Request
from kbx_env.outcome import Outcome

T = TypeVar("T")


@dataclass(eq=False)
class Waiter:
    """One submitted request that waits for its outcome.

    Attributes:
        request: the submission to grade.
        content: ``request.content``: waiters of equal content share a job.
        until: its deadline in seconds of ``time.monotonic``; infinite without a deadline.
        order: its number in order of submission.
        future: gets the outcome.
        admitted: set once ``submit`` need not block any more: the request is in the queue, or was cancelled or settled.
        job: the grading that it waits for; ``None`` before it is admitted.
    """

    request: Request
    content: str
    until: float
    order: int = 0
    future: Future[Outcome] = field(default_factory=Future)
    admitted: threading.Event = field(default_factory=threading.Event)
    job: Job | None = None


@dataclass(eq=False)
class Job:
    """One grading, shared by all waiters of equal content.

    Attributes:
        request: of the first waiter.
        content: ``request.content``.
        order: of the first waiter.
        waiters: that get its outcome.
        began: whether a worker has begun it.
    """

    request: Request
    content: str
    order: int
    waiters: list[Waiter] = field(default_factory=list)
    began: bool = False

    @property
    def priority(self) -> int:
        """The highest priority of its waiters."""
        return max(w.request.priority for w in self.waiters)

    def until(self) -> float:
        """Return the latest deadline of the waiters without an outcome.

        Returns:
            Seconds of ``time.monotonic``; minus infinity when no waiter is left.
        """
        return max((w.until for w in self.waiters if not w.future.done()), default=float("-inf"))


class PriorityQueue(Generic[T]):
    """A queue that gives the highest priority first, equal priorities by order number. Not thread-safe."""

    def __init__(self) -> None:
        """Make an empty queue."""
        self._rank: dict[T, tuple[int, int]] = {}
        self._heap: list[tuple[tuple[int, int], T]] = []

    def __len__(self) -> int:
        """Return the number of items."""
        return len(self._rank)

    def put(self, item: T, priority: int, order: int) -> None:
        """Add an item, or move it if it is in the queue.

        Args:
            item: hashable.
            priority: higher comes first.
            order: lower comes first among equal priorities; unique to the item.
        """
        rank = (-priority, order)
        if self._rank.get(item) != rank:
            self._rank[item] = rank
            heapq.heappush(self._heap, (rank, item))

    def take(self) -> T | None:
        """Remove and return the first item, ``None`` when the queue is empty."""
        while self._heap:
            rank, item = heapq.heappop(self._heap)
            if self._rank.get(item) == rank:  # otherwise it was moved or dropped since
                del self._rank[item]
                return item
        return None

    def drop(self, item: T) -> None:
        """Remove an item, if it is in the queue."""
        self._rank.pop(item, None)

    def clear(self) -> list[T]:
        """Remove and return all items."""
        items = list(self._rank)
        self._rank.clear()
        self._heap.clear()
        return items


_PURGE = 1024
"""Deadlines from which on those of requests with an outcome are thrown away."""


class DeadlineTimer:
    """Calls a function for each waiter whose deadline passes. Has one thread, which starts with the first waiter."""

    def __init__(self, on_expired: Callable[[Waiter], None]) -> None:
        """Make a timer without waiters.

        Args:
            on_expired: called in the thread of the timer.
        """
        self._on_expired, self._due, self._closed = on_expired, list[tuple[float, int, Waiter]](), False
        self._changed, self._purge_at = threading.Condition(), _PURGE
        self._thread: threading.Thread | None = None

    def set(self, waiter: Waiter) -> None:
        """Call ``on_expired`` at ``waiter.until``, unless its future is done by then."""
        with self._changed:
            heapq.heappush(self._due, (waiter.until, waiter.order, waiter))
            if len(self._due) >= self._purge_at:  # deadlines may be a day away: their requests would stay in memory
                self._due[:] = [due for due in self._due if not due[2].future.done()]
                heapq.heapify(self._due)
                self._purge_at = max(_PURGE, 2 * len(self._due))
            if self._thread is None:
                self._thread = threading.Thread(target=self._watch, name="deadlines", daemon=True)
                self._thread.start()
            self._changed.notify()

    def close(self) -> None:
        """End the thread; later deadlines are ignored."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    def _watch(self) -> None:
        while True:
            with self._changed:
                while not self._closed and (not self._due or self._due[0][0] > time.monotonic()):
                    self._changed.wait(self._due[0][0] - time.monotonic() if self._due else None)
                if self._closed:
                    return
                waiter = heapq.heappop(self._due)[2]
            if not waiter.future.done():
                self._on_expired(waiter)
