"""Runs gradings over a lane: priorities, sharing, attempts, deadlines, back-pressure, cancellation, and a store."""

from __future__ import annotations

import asyncio
import itertools
import math
import threading
import time
from collections.abc import AsyncIterator, Iterable
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor

from kbx_env.deadlines import deadline_of
from kbx_env.errors import UsageError
from kbx_env.executor.direct import ATTEMPTS, final, numbered
from kbx_env.executor.pools.process import Request, WorkerLost, WorkerPool
from kbx_env.executor.queue import DeadlineTimer, Job, PriorityQueue, Waiter
from kbx_env.outcome import GRADER_FAILED, Fault, FaultKind, Outcome, Stage, Verdict
from kbx_env.store import Store

__all__ = ["Executor"]


_MOMENT = 0.05
"""Seconds before a deadline in which nothing is begun any more."""


class Executor:
    """Grades requests over a lane: equal ones once, infrastructure faults again, everything kept in the store.

    Requests of a higher priority begin first, equal ones in order of submission; requests of equal content that are
    under way share one grading, at the highest priority asked for.

    At most ``capacity`` gradings wait; the next ``submit`` blocks until one has begun. A request that joins a grading
    which is there already never blocks, nor does one that is submitted from the executor's own threads (a done-callback):
    it would wait for itself.

    A future may be cancelled until it has its verdict. A grading that waits leaves the queue with the last one who
    wanted it. One that runs is left to end, and its verdict is stored for everybody who asked: stopping it would cost a
    warm worker, and another may want it by then.
    """

    def __init__(
        self,
        lane: WorkerPool,
        attempts: int = ATTEMPTS,
        store: Store | None = None,
        deadline: float = deadline_of(timed=False),
        capacity: int | None = None,
    ) -> None:
        """An executor over a lane, which it closes with itself.

        Args:
            lane: where gradings run.
            attempts: gradings of one request before an infrastructure fault is final.
            store: keeps every outcome, and answers what it holds already; the caller closes it.
            deadline: seconds for one attempt.
            capacity: gradings that may wait before ``submit`` blocks; 4 for each place of the lane by default.

        Raises:
            UsageError: no attempt, or a capacity below 1.
        """
        capacity = 4 * lane.width if capacity is None else capacity
        for name, value in (("attempts", attempts), ("capacity", capacity)):
            if value < 1:
                raise UsageError(f"{name} of the executor is {value!r}; at least 1")
        self._lane, self._attempts, self._store, self._deadline = lane, attempts, store, deadline
        self._capacity, self._width, self._closed = capacity, lane.width, False
        self._mine = threading.local()
        # The pool gets one token for every grading that waits; which one a token takes is decided when it runs.
        self._pool = ThreadPoolExecutor(lane.width, thread_name_prefix="grade", initializer=self._own)
        self._lock = threading.RLock()
        self._orders = itertools.count()
        self._flight: dict[str, Job] = {}
        self._waiting: PriorityQueue[Job] = PriorityQueue()
        self._outside: PriorityQueue[Waiter] = PriorityQueue()  # those for whom there is no room
        self._alarms = DeadlineTimer(self._expire)

    def submit(self, request: Request) -> Future[Outcome]:
        """The verdict to come: an ``infra_fault`` outcome when every attempt was lost, never a lost exception.

        Blocks while ``capacity`` gradings wait. When the request's deadline passes first, the outcome is an
        ``infra_fault``: the message says whether it was ever begun.

        Raises:
            RuntimeError: the executor is closed.
        """
        want = self._stored(request) or self._enter(request)
        try:
            want.admitted.wait()
        except BaseException:  # Ctrl-C
            want.future.cancel()
            raise
        return want.future

    async def asubmit(self, request: Request) -> Outcome:
        """The verdict. While ``capacity`` gradings wait, the request stands outside, in order of priority as well.

        Cancelling the task cancels the request.

        Raises:
            UsageError: what the grader refuses.
            RuntimeError: the executor is closed, or was closed meanwhile.
        """
        stored = await asyncio.to_thread(self._stored, request) if self._store else None  # the file may be locked
        want = stored or self._enter(request)
        try:
            return await asyncio.wrap_future(want.future)
        except asyncio.CancelledError:
            want.future.cancel()
            task = asyncio.current_task()
            if task is not None and not task.cancelling():  # it was not the task that was cancelled
                raise RuntimeError("the executor was closed before the verdict") from None
            raise

    async def stream(self, requests: Iterable[Request]) -> AsyncIterator[tuple[Request, Outcome]]:
        """Each request with its outcome, as they end; takes no more of them than there is room for.

        When the caller stops early, what has not ended is cancelled as soon as the generator is closed
        (``contextlib.aclosing``).
        """
        rest = iter(requests)
        flight: dict[asyncio.Task[Outcome], Request] = {}
        try:
            while True:
                for request in itertools.islice(rest, self._width + self._capacity - len(flight)):
                    flight[asyncio.create_task(self.asubmit(request))] = request
                if not flight:
                    return
                ended, _ = await asyncio.wait(flight, return_when=asyncio.FIRST_COMPLETED)
                for task in ended:
                    yield flight.pop(task), task.result()
        finally:
            for task in flight:
                task.cancel()
            await asyncio.gather(*flight, return_exceptions=True)

    def grade_many(self, requests: Iterable[Request], progress: bool = True) -> list[Outcome]:
        """The outcomes in the order of the requests, which are all submitted at once: back-pressure is for others.

        Args:
            requests: what to grade.
            progress: show a bar on stderr, if that is a terminal.

        Raises:
            UsageError: what the grader refuses; nothing more is begun then.
            KeyboardInterrupt: on Ctrl-C; nothing more is begun, and what has ended is in the store.
        """
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        asked = list(requests)
        console = Console(stderr=True)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        futures: list[Future[Outcome]] = []
        with Progress(*columns, console=console, disable=not (progress and console.is_terminal)) as bar:
            line = bar.add_task("grading", total=len(asked))
            try:
                for request in asked:
                    futures.append((self._stored(request) or self._enter(request)).future)
                    futures[-1].add_done_callback(lambda _: bar.advance(line))
                return [f.result() for f in futures]
            except BaseException:
                for f in futures:
                    f.cancel()
                raise

    def close(self) -> None:
        """Give up what has not begun and end the lane; what has ended is in the store."""
        with self._lock:
            self._closed = True
            left = [w for job in self._waiting.clear() for w in job.wants] + self._outside.clear()
        for want in left:
            want.future.cancel()
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._lane.close()
        self._pool.shutdown(wait=True)
        self._alarms.close()

    def __enter__(self) -> Executor:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # -- into the queue and out of it ------------------------------------------------------

    def _own(self) -> None:
        self._mine.thread = True

    def _known(self, request: Request) -> Outcome | None:
        """What the store knows: this request, or the same source under the same options from another policy or sample."""
        if self._store is None:
            return None
        stored = self._store.get(request.key)
        if stored is None:
            stored = self._store.same(request.record, request.source)
            if stored is not None:  # a row of its own: reports count gradings by policy and sample
                self._keep(request, stored)
        return stored

    def _keep(self, request: Request, outcome: Outcome) -> None:
        # A grader with layers of defence left out says so in its outcomes, but no request does: they answer nobody else.
        if self._store is not None and not outcome.manifest.get("without"):
            self._store.put(request.key, request.policy, request.sample, request.record, request.source, outcome)

    def _stored(self, request: Request) -> Waiter | None:
        outcome = self._known(request)
        if outcome is None:
            return None
        want = Waiter(request, "", math.inf)
        want.future.set_result(outcome)
        want.admitted.set()
        return want

    def _enter(self, request: Request) -> Waiter:
        until = math.inf if request.deadline is None else time.monotonic() + request.deadline
        want = Waiter(request, request.content, until)
        want.future.add_done_callback(lambda _: self._left(want))
        with self._lock:
            if self._closed:
                raise RuntimeError("the executor is closed")
            want.order = next(self._orders)
            if want.content in self._flight or len(self._waiting) < self._capacity or hasattr(self._mine, "thread"):
                self._admit(want)
            else:
                self._outside.put(want, request.priority, want.order)
        if until < math.inf:
            self._alarms.set(want)
        return want

    def _admit(self, want: Waiter) -> None:
        job = self._flight.get(want.content)
        if job is None:
            job = self._flight[want.content] = Job(want.request, want.content, want.order)
            self._pool.submit(self._work)
        job.wants.append(want)
        want.job = job
        if not job.began:
            self._waiting.put(job, job.priority, job.order)
        want.admitted.set()

    def _let_in(self) -> None:
        while not self._closed and len(self._waiting) < self._capacity and (want := self._outside.take()):
            self._admit(want)

    def _left(self, want: Waiter) -> None:
        if want.future.cancelled():
            want.future.set_running_or_notify_cancel()  # wakes those in concurrent.futures.wait
            with self._lock:
                self._drop(want)

    def _drop(self, want: Waiter) -> None:
        """Out of the queue, if it waits; who shares its grading stays."""
        self._outside.drop(want)
        job = want.job
        if job is not None and not job.began and want in job.wants:
            job.wants.remove(want)
            if job.wants:
                self._waiting.put(job, job.priority, job.order)
            else:
                self._waiting.drop(job)
                self._flight.pop(job.content, None)
                self._let_in()
        want.admitted.set()

    def _expire(self, want: Waiter) -> None:
        self._own()  # of the alarms' thread, which must not block in a callback
        with self._lock:
            began = want.job is not None and want.job.began
            self._drop(want)
        self._settle(want, _late(want.request, began))

    # -- grading ---------------------------------------------------------------------------

    def _work(self) -> None:
        with self._lock:
            job = self._waiting.take()
            if job is None:  # its request was cancelled
                return
            job.began = True
            self._let_in()
        outcome: Outcome | None = None
        error: BaseException | None = None
        try:
            outcome = self._attempt(job)
        except BaseException as e:
            error = e
        with self._lock:
            self._flight.pop(job.content, None)
        for want in job.wants:
            if outcome or error or not want.future.done():
                self._settle(want, outcome or _late(want.request, True), error)

    def _settle(self, want: Waiter, outcome: Outcome, error: BaseException | None = None) -> None:
        request = want.request
        try:
            if error is None:
                self._keep(request, outcome)
        except Exception as e:
            error = e
        try:
            if error is not None:
                want.future.set_exception(error)
            else:
                want.future.set_result(outcome)
        except InvalidStateError:  # cancelled, or too late
            pass

    def _attempt(self, job: Job) -> Outcome | None:
        """The outcome; ``None`` when the time of everybody who wanted it is up."""
        request, attempt, outcome = job.request, 1, None
        faults: list[str] = []
        while attempt <= self._attempts and not (outcome and self._closed):
            start = time.monotonic()
            with self._lock:
                left = job.until() - start
            if left < _MOMENT:
                return outcome if left == -math.inf else None
            try:
                outcome = self._lane.grade(request, min(left, self._deadline))
            except WorkerLost as e:
                if left <= self._deadline and time.monotonic() > start + left - _MOMENT:
                    continue  # cut short for those whose time is up; another, who joined meanwhile, may have more
                outcome = _infra(request, str(e), FaultKind.WORKER_LOST)
            except UsageError:
                raise
            except Exception as e:  # a fault of the grader is never held against a submission
                outcome = _infra(request, f"{GRADER_FAILED}: {type(e).__name__}: {e}", FaultKind.GRADER_FAILED)
            outcome = numbered(outcome, attempt, faults)
            if final(outcome):
                break
            attempt += 1
        return outcome


def _infra(request: Request, message: str, kind: FaultKind, attempt: int = 1) -> Outcome:
    options = request.options
    return Outcome(
        request.task, Verdict.INFRA_FAULT, Stage.COMPILE, str(options.get("backend", "auto")),
        str(options.get("grading", "contract")), Fault.INFRA, message, manifest={"attempt": attempt}, fault_kind=kind,
    )  # fmt: skip


def _late(request: Request, began: bool) -> Outcome:
    within = f"its deadline of {request.deadline:g} s" if request.deadline else "its deadline"
    if began:
        return _infra(request, f"no verdict within {within}", FaultKind.DEADLINE)
    return _infra(request, f"never begun: {within} passed while it waited", FaultKind.DEADLINE, attempt=0)
