"""The queue of the grading service: ids, states, sharing and the restart, on top of the executor, the store and the journal."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import json
import sqlite3
import sys
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field
from typing import Any

from kbx_env.errors import KbxError, UsageError
from kbx_env.executor import Executor, Request, WorkerPool
from kbx_env.options import GradeOptions
from kbx_env.outcome import GRADER_FAILED, Fault, FaultKind, Outcome, Stage, Verdict
from kbx_env.service.journal import Entry, Journal
from kbx_env.service.limits import Limits
from kbx_env.service.schema import State
from kbx_env.spec.catalog import load_task
from kbx_env.store import Store

POLICY = "service"
"""Name of the policy under which the store keeps the service's gradings."""
RECENT = 1000
"""Ended gradings that stay in memory; older ones are read from the store."""
RATE_SECONDS = 60.0
"""Seconds over which the rate is counted."""
_LEAST_RETRY, _MOST_RETRY = 1.0, 15.0
"""Bounds of Retry-After in seconds."""
_RECENT_SHARE = 0.05
"""Weight of the last grading in the mean duration."""


class QueueFull(KbxError):
    """The queue has no room.

    Attributes:
        retry_after: seconds after which there may be room.
    """

    def __init__(self, text: str, retry_after: float) -> None:
        """Make the error.

        Args:
            text: the message.
            retry_after: seconds after which there may be room.
        """
        super().__init__(text)
        self.retry_after = retry_after


class Draining(KbxError):
    """The service is about to end and takes no further request."""


class Conflict(KbxError):
    """The id of a request belongs to another one."""


class JournalFailed(KbxError):
    """The request cannot be recorded, so that it is not accepted."""


@dataclass(eq=False)
class Grading:
    """One accepted request.

    Attributes:
        id: of the request.
        request: the submission; ``None`` once it has ended.
        key: of its grading in the store.
        content: by which equal requests share a grading.
        task: id of the task.
        created: seconds since 1970.
        state: waiting (also while it runs), done or cancelled.
        future: of the executor; ``None`` before it is submitted and after the end.
        outcome: JSON of the outcome, once there is one.
        ended: set at the end.
        listeners: called at the end.
    """

    id: str
    request: Request | None
    key: str
    content: str
    task: str
    created: float
    state: State = State.WAITING
    future: Future[Outcome] | None = None
    outcome: str | None = None
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    listeners: list[Callable[[Grading], None]] = field(default_factory=list)


class ObservedPool:
    """A worker pool that knows which requests run.

    Attributes:
        width: gradings at a time.
        mean_seconds: of the last gradings; 0 before the first.
    """

    def __init__(self, pool: WorkerPool) -> None:
        """Take over a pool.

        Args:
            pool: ``close`` closes it.
        """
        self._pool, self.width, self.mean_seconds = pool, pool.width, 0.0
        self._running: Counter[str] = Counter()

    def grade(self, request: Request, deadline: float) -> Outcome:
        """Grade with the pool; see ``WorkerPool``."""
        content = request.content
        self._running[content] += 1
        start = time.monotonic()
        try:
            return self._pool.grade(request, deadline)
        finally:
            seconds = time.monotonic() - start
            self.mean_seconds += (seconds - self.mean_seconds) * (_RECENT_SHARE if self.mean_seconds else 1.0)
            self._running[content] -= 1
            if not self._running[content]:
                del self._running[content]

    def runs(self, content: str) -> bool:
        """Return whether a request of this content runs."""
        return content in self._running

    @property
    def running(self) -> int:
        """Number of gradings that run."""
        return len(self._running)

    def close(self) -> None:
        """Close the pool."""
        self._pool.close()


class GradingQueue:
    """All gradings of the service. Its methods are called in one event loop.

    Attributes:
        draining: set when the service is about to end: requests that wait are answered, and no further one is accepted.
        verdicts: number of ended gradings by verdict, since the start.
        reused: number of requests that were answered from the store.
        recent: the last ended gradings.
        on_end: called with each outcome that a worker made, and the seconds from acceptance to it.
    """

    def __init__(
        self, pool: WorkerPool, store: Store, journal: Journal, backend: str, about: Mapping[str, Any], limits: Limits
    ) -> None:
        """Make a queue in the running event loop.

        Args:
            pool: runs the gradings; closed by ``close``.
            store: of outcomes; it belongs to the caller.
            journal: of requests; it belongs to the caller.
            backend: of the pool, ``cpu`` or ``cuda``.
            about: device and versions, for the store's keys.
            limits: of the service.
        """
        timed = backend == "cuda"
        longest = GradeOptions(backend=backend, wall=limits.wall, compiled=timed).deadline
        self.pool = ObservedPool(pool)
        self._executor = Executor(self.pool, store=store, deadline=longest, capacity=sys.maxsize)
        self._store, self._journal, self._about, self._limits = store, journal, dict(about), limits
        self.backend = backend
        self._loop = asyncio.get_running_loop()
        self._active: dict[str, Grading] = {}
        self._ended: OrderedDict[str, Grading] = OrderedDict()
        self.draining = asyncio.Event()
        self.verdicts: Counter[str] = Counter()
        self.reused = 0
        self.recent: deque[dict[str, Any]] = deque(maxlen=20)
        self._times: deque[float] = deque(maxlen=100_000)
        self.on_end: Callable[[Outcome, float], None] = lambda outcome, seconds: None

    # -- numbers ---------------------------------------------------------------------------

    @property
    def running(self) -> int:
        """Number of gradings that run."""
        return self.pool.running

    @property
    def waiting(self) -> int:
        """Number of accepted requests without an outcome that do not run."""
        return max(0, len(self._active) - self.running)

    @property
    def ended(self) -> int:
        """Number of gradings that have ended since the start."""
        return sum(self.verdicts.values())

    def rate(self) -> float:
        """Return the gradings a second over the last minute."""
        now = time.monotonic()
        while self._times and self._times[0] < now - RATE_SECONDS:
            self._times.popleft()
        return len(self._times) / RATE_SECONDS

    def retry_after(self) -> float:
        """Return the seconds after which a tenth of the queue has probably ended."""
        seconds = 0.1 * len(self._active) * self.pool.mean_seconds / self.pool.width
        return min(_MOST_RETRY, max(_LEAST_RETRY, seconds))

    # -- in --------------------------------------------------------------------------------

    def request(self, task: str, source: bytes, options: Mapping[str, Any], priority: int, deadline: float | None) -> Request:
        """Check a submission.

        Args:
            task: id of the task, or its bare name where that is unique.
            source: the submission.
            options: fields of ``GradeOptions``.
            priority: of the request.
            deadline: in seconds; at most the service's limit, which is the default.

        Returns:
            The request for the executor.

        Raises:
            UsageError: no such task, or an option that is not accepted here.
        """
        found = load_task(task)
        chosen = _checked(json.dumps(dict(options), sort_keys=True), self.backend, self._limits.wall)
        limit = self._limits.deadline
        about = {**self._about, "fingerprint": found.fingerprint}
        until = limit if deadline is None else min(deadline, limit)
        return Request(found.id, source, chosen, about, POLICY, priority=priority, deadline=until)

    async def submit(self, asked: Sequence[tuple[str, Request]]) -> list[Grading]:
        """Accept requests, all or none of them.

        Args:
            asked: (id, request).

        Returns:
            Their gradings; a request with a known id and equal content is the known one.

        Raises:
            QueueFull: they do not fit.
            Draining: the service is about to end.
            Conflict: an id belongs to other content.
            JournalFailed: they cannot be recorded.
        """
        made = [Grading(id, r, r.key, r.content, r.task, time.time()) for id, r in asked]
        known = {g.id: found for g in made if (found := self._known(g)) is not None}
        fresh = {g.id: g for g in made if g.id not in known}
        if fresh:
            await self._accept(list(fresh.values()))
        return [known.get(g.id) or self._active.get(g.id) or self._ended.get(g.id) or fresh[g.id] for g in made]

    def _known(self, grading: Grading) -> Grading | None:
        found = self._active.get(grading.id) or self._ended.get(grading.id)
        if found is not None and found.key != grading.key:
            raise Conflict(f"the id {grading.id} belongs to another request; choose a new id")
        # A withdrawn request that is repeated is a new one.
        return None if found is not None and found.state is State.CANCELLED else found

    async def _accept(self, fresh: Sequence[Grading]) -> None:
        if self.draining.is_set():
            raise Draining("the service is about to end; try again in a moment")
        stored = await asyncio.to_thread(lambda: [self._store.get(g.key) for g in fresh])
        left = []
        for grading, outcome in zip(fresh, stored, strict=True):
            if self._known(grading) is not None:  # the same request came a second time meanwhile
                continue
            if outcome is None:
                left.append(grading)
            else:
                self.reused += 1
                self._settle(grading, State.DONE, outcome.to_json(), outcome, graded=False)
        # From here to the reservation nothing else runs in the loop, so that the count holds.
        if len(self._active) + len(left) > self._limits.queue:
            raise QueueFull(
                f"the queue is full ({len(self._active)} of {self._limits.queue} gradings); try again later", self.retry_after()
            )
        if not left:
            return
        for grading in left:
            self._active[grading.id] = grading
        recorded = self._journal.add([_entry(g) for g in left])
        # Grading may begin before the record is written; the answer that the request is accepted waits for it.
        await self._start(left)
        try:
            await asyncio.wrap_future(recorded)
        except (sqlite3.Error, OSError) as e:
            for grading in left:
                self.cancel(grading)
            raise JournalFailed(f"the request cannot be recorded: {e}") from e

    async def _start(self, gradings: Sequence[Grading]) -> None:
        """Hand gradings to the executor. In a thread, because it looks into the store."""

        def submit() -> list[Future[Outcome]]:
            return [self._executor.submit(g.request) for g in gradings if g.request is not None]

        try:
            futures = await asyncio.to_thread(submit)
        except RuntimeError as e:  # closed meanwhile: the journal keeps them
            raise Draining("the service is about to end; try again in a moment") from e
        for grading, future in zip(gradings, futures, strict=True):
            grading.future = future
            if grading.state is State.CANCELLED or self.draining.is_set():
                future.cancel()
            future.add_done_callback(functools.partial(self._from_executor, grading))

    def _from_executor(self, grading: Grading, future: Future[Outcome]) -> None:
        """Hand the end of a grading to the loop; called in a thread of the executor."""
        try:
            self._loop.call_soon_threadsafe(self._on_done, grading, future)
        except RuntimeError:  # the loop is closed: the journal keeps the request, the store the outcome
            pass

    def _on_done(self, grading: Grading, future: Future[Outcome]) -> None:
        if self._active.get(grading.id) is not grading:  # withdrawn
            return
        try:
            outcome = future.result()
        except CancelledError:
            if not self.draining.is_set():
                self._settle(grading, State.CANCELLED, None)
            return
        except Exception as e:  # the grader refused what passed the check, or the store failed
            outcome = _failed(grading, e)
        if self.draining.is_set() and outcome.fault is Fault.INFRA:
            return  # lost because the service ends: the next start grades it again
        text = outcome.to_json()
        self._journal.end(grading.id, State.DONE, text if outcome.fault is Fault.INFRA else None)
        self._settle(grading, State.DONE, text, outcome)

    def _settle(
        self, grading: Grading, state: State, text: str | None, outcome: Outcome | None = None, graded: bool = True
    ) -> None:
        """End a grading, and tell all that wait for it."""
        self._active.pop(grading.id, None)
        grading.state, grading.outcome, grading.request, grading.future = state, text, None, None
        self._ended[grading.id] = grading
        self._ended.move_to_end(grading.id)
        while len(self._ended) > RECENT:
            self._ended.popitem(last=False)
        if outcome is not None and graded:
            self._times.append(time.monotonic())
            self.verdicts[str(outcome.verdict)] += 1
            self.on_end(outcome, time.time() - grading.created)
            seconds = outcome.seconds.get("total")
            self.recent.appendleft({
                "id": grading.id, "task": grading.task, "verdict": str(outcome.verdict), "seconds": seconds, "ended": time.time(),
            })  # fmt: skip
        grading.ended.set()
        listeners, grading.listeners = grading.listeners, []
        for call in listeners:
            call(grading)

    # -- out -------------------------------------------------------------------------------

    def state(self, grading: Grading) -> State:
        """Return the state of a grading; running if a worker has its content."""
        running = grading.state is State.WAITING and self.pool.runs(grading.content)
        return State.RUNNING if running else grading.state

    async def find(self, id: str) -> Grading | None:
        """Return a grading by its id; ``None`` if it is not known."""
        found = self._active.get(id) or self._ended.get(id)
        if found is not None:
            return found
        entry = await asyncio.to_thread(self._journal.find, id)
        if entry is None or entry.state == State.WAITING:
            return self._active.get(id) or self._ended.get(id)  # it may have been accepted meanwhile
        text = entry.outcome
        if text is None and entry.state == State.DONE:
            outcome = await asyncio.to_thread(self._store.get, entry.key)
            if outcome is None:  # the store was deleted or pruned
                return None
            text = outcome.to_json()
        grading = Grading(id, None, entry.key, "", entry.task, entry.created, State(entry.state), outcome=text)
        grading.ended.set()
        return grading

    async def wait(self, grading: Grading, seconds: float) -> None:
        """Wait until a grading has ended, the seconds are over, or the service is about to end."""
        if grading.ended.is_set() or seconds <= 0:
            return
        waits = [asyncio.ensure_future(e.wait()) for e in (grading.ended, self.draining)]
        try:
            await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for w in waits:
                w.cancel()

    def cancel(self, grading: Grading) -> None:
        """Withdraw a request. A grading that a worker has begun ends nevertheless, and its outcome is stored."""
        if self._active.get(grading.id) is not grading:
            return
        future = grading.future
        self._journal.end(grading.id, State.CANCELLED)
        self._settle(grading, State.CANCELLED, None)
        if future is not None:
            future.cancel()

    # -- restart and end -------------------------------------------------------------------

    async def recover(self) -> int:
        """Take up the requests that an earlier process has accepted and not ended.

        Returns:
            Their number. Requests whose verdict is in the store end at once.
        """
        entries = await asyncio.to_thread(lambda: list(self._journal.waiting()))
        again = []
        for entry in entries:
            settings, source = entry.settings, entry.source or b""
            try:
                request = self.request(entry.task, source, settings["options"], settings["priority"], settings["deadline"])
            except (UsageError, KeyError) as e:  # another version has other tasks or options
                text = _infra(entry.task, self.backend, f"it cannot be taken up again after a restart: {e}").to_json()
                self._journal.end(entry.id, State.DONE, text)
                continue
            grading = Grading(entry.id, request, request.key, request.content, entry.task, entry.created)
            self._active[grading.id] = grading
            again.append(grading)
        changed = [_entry(g) for g, e in zip(again, entries, strict=False) if g.key != e.key]
        if changed:  # another version: the keys are new
            await asyncio.wrap_future(self._journal.add(changed))
        for start in range(0, len(again), self._limits.batch):
            await self._start(again[start : start + self._limits.batch])
        return len(entries)

    def hold(self) -> None:
        """Accept nothing more, and begin no further grading. Requests that wait stay in the journal."""
        if self.draining.is_set():
            return  # what ran at the first call may be on its way to the store now
        self.draining.set()
        for grading in list(self._active.values()):
            if grading.future is not None and not self.pool.runs(grading.content):
                grading.future.cancel()

    async def drain(self, seconds: float, patient: Callable[[], bool] = lambda: True) -> int:
        """Hold, and wait for the gradings that run.

        Args:
            seconds: the longest wait.
            patient: whether to wait on.

        Returns:
            Number of requests that the next start takes up.
        """
        self.hold()
        running = [g for g in self._active.values() if g.future is not None and not g.future.done()]
        until = time.monotonic() + seconds
        while any(g.future and not g.future.done() for g in running) and patient() and time.monotonic() < until:
            await asyncio.sleep(0.05)
        for grading in list(self._active.values()):  # outcomes that have not reached the loop
            if grading.future is not None and grading.future.done():
                self._on_done(grading, grading.future)
        return len(self._active)

    def close(self) -> None:
        """Close the executor and its workers."""
        self._executor.close()


@functools.lru_cache(maxsize=1024)
def _checked_json(text: str, backend: str, wall: float) -> str:
    options = json.loads(text)
    asked = options.pop("backend", "auto")
    if asked not in ("auto", backend):
        raise UsageError(f"this service grades on backend {backend!r}, not on {asked!r}; leave it out, or ask another service")
    chosen = GradeOptions.of({**options, "backend": backend}).resolved()
    if chosen.wall > wall:
        raise UsageError(f"wall is {chosen.wall:g}; this service allows at most {wall:g} seconds")
    return json.dumps(dataclasses.asdict(chosen))


def _checked(text: str, backend: str, wall: float) -> dict[str, Any]:
    options: dict[str, Any] = json.loads(_checked_json(text, backend, wall))
    return options


def _entry(grading: Grading) -> Entry:
    request = grading.request
    assert request is not None
    settings = {"options": dict(request.options), "priority": request.priority, "deadline": request.deadline}
    return Entry(grading.id, grading.key, grading.task, State.WAITING, grading.created, settings, request.source)


def _failed(grading: Grading, error: BaseException) -> Outcome:
    options = grading.request.options if grading.request else {}
    text = f"{GRADER_FAILED}: {type(error).__name__}: {error}"[:1000]
    return _infra(grading.task, str(options.get("backend", "auto")), text)


def _infra(task: str, backend: str, text: str) -> Outcome:
    return Outcome(
        task, Verdict.INFRA_FAULT, Stage.COMPILE, backend, "contract", Fault.INFRA, text, fault_kind=FaultKind.GRADER_FAILED
    )
