"""What the executor waits with: who wants which grading, a line by priority, and a clock for deadlines."""

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
    """One caller's wish for a verdict. ``admitted`` is set when it no longer stands outside, for whatever reason."""

    request: Request
    content: str
    until: float
    """Monotonic seconds; infinite without a deadline."""
    order: int = 0
    future: Future[Outcome] = field(default_factory=Future)
    admitted: threading.Event = field(default_factory=threading.Event)
    job: Job | None = None


@dataclass(eq=False)
class Job:
    """One grading, for everybody who wants its verdict."""

    request: Request
    content: str
    order: int
    wants: list[Waiter] = field(default_factory=list)
    began: bool = False

    @property
    def priority(self) -> int:
        """The highest that was asked for."""
        return max(w.request.priority for w in self.wants)

    def until(self) -> float:
        """When the last of those who still want the verdict gives up; minus infinity when nobody wants it."""
        return max((w.until for w in self.wants if not w.future.done()), default=float("-inf"))


class PriorityQueue(Generic[T]):
    """A queue: the highest priority first, equal ones by their order number. Not for several threads at a time."""

    def __init__(self) -> None:
        self._rank: dict[T, tuple[int, int]] = {}
        self._heap: list[tuple[tuple[int, int], T]] = []

    def __len__(self) -> int:
        return len(self._rank)

    def put(self, item: T, priority: int, order: int) -> None:
        """Put it in, or to its new place. An order number belongs to one item for good."""
        rank = (-priority, order)
        if self._rank.get(item) != rank:
            self._rank[item] = rank
            heapq.heappush(self._heap, (rank, item))

    def take(self) -> T | None:
        """The next one, ``None`` when nobody waits."""
        while self._heap:
            rank, item = heapq.heappop(self._heap)
            if self._rank.get(item) == rank:  # otherwise it has moved, or left
                del self._rank[item]
                return item
        return None

    def drop(self, item: T) -> None:
        """Take it out, if it is there."""
        self._rank.pop(item, None)

    def clear(self) -> list[T]:
        """Take out all."""
        found = list(self._rank)
        self._rank.clear()
        self._heap.clear()
        return found


class DeadlineTimer:
    """Hands wants to ``ring`` when their time is up, from one thread, which starts with the first."""

    def __init__(self, ring: Callable[[Waiter], None]) -> None:
        self._ring, self._due, self._closed = ring, list[tuple[float, int, Waiter]](), False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def set(self, want: Waiter) -> None:
        """Ring at ``want.until``, unless its future is done by then."""
        with self._changed:
            heapq.heappush(self._due, (want.until, want.order, want))
            if self._thread is None:
                self._thread = threading.Thread(target=self._watch, name="deadlines", daemon=True)
                self._thread.start()
            self._changed.notify()

    def close(self) -> None:
        """Ring no more."""
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
                want = heapq.heappop(self._due)[2]
            if not want.future.done():
                self._ring(want)
