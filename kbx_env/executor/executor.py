"""Runs gradings on a worker pool: priorities, sharing, attempts, deadlines, back-pressure, cancellation, and a store."""

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


_LEAST_SECONDS = 0.05
"""No attempt begins when fewer seconds than this are left before the deadline."""


class Executor:
    """Grades requests on a worker pool. Equal requests share a grading, infrastructure faults are tried again.

    Requests with a higher priority begin first; requests of equal priority begin in order of submission. Requests of equal
    content that are in progress at the same time share one grading, which has the highest of their priorities.

    At most ``capacity`` gradings wait in the queue; the next ``submit`` blocks until one of them has begun. Two kinds of
    request never block: a request that joins a grading in progress, and a request that is submitted from a thread of the
    executor itself (in a done-callback), which would wait for itself.

    A future can be cancelled until it has its outcome. A grading leaves the queue when its last waiter cancels. A grading
    that runs is not stopped, and its outcome is stored for every waiter: stopping it would cost a warm worker, and another
    request for the same content may arrive meanwhile.
    """

    def __init__(
        self,
        pool: WorkerPool,
        attempts: int = ATTEMPTS,
        store: Store | None = None,
        deadline: float = deadline_of(timed=False),
        capacity: int | None = None,
    ) -> None:
        """Take over a worker pool, which ``close`` closes too.

        Args:
            pool: runs the gradings.
            attempts: gradings of one request before an infrastructure fault is final.
            store: keeps every outcome, and supplies outcomes that it already has; the caller closes it.
            deadline: seconds for one attempt.
            capacity: gradings that may wait before ``submit`` blocks; 4 for each worker of the pool by default.

        Raises:
            UsageError: ``attempts`` or ``capacity`` is below 1.
        """
        capacity = 4 * pool.width if capacity is None else capacity
        for name, value in (("attempts", attempts), ("capacity", capacity)):
            if value < 1:
                raise UsageError(f"{name} of the executor is {value!r}; at least 1")
        self._pool, self._attempts, self._store, self._deadline = pool, attempts, store, deadline
        self._capacity, self._width, self._closed = capacity, pool.width, False
        self._thread_local = threading.local()  # has the attribute ``own`` in threads of this executor
        # Each queued grading gets one ``_work`` call. The call chooses its grading when it runs, by priority.
        self._threads = ThreadPoolExecutor(pool.width, thread_name_prefix="grade", initializer=self._mark_own_thread)
        self._lock = threading.RLock()
        self._orders = itertools.count()
        self._jobs: dict[str, Job] = {}  # by content: the gradings that wait or run
        self._waiting: PriorityQueue[Job] = PriorityQueue()
        self._blocked: PriorityQueue[Waiter] = PriorityQueue()  # beyond the capacity
        self._timer = DeadlineTimer(self._expire)

    def submit(self, request: Request) -> Future[Outcome]:
        """Queue a request. Blocks while ``capacity`` gradings wait.

        Args:
            request: the submission to grade.

        Returns:
            The future outcome. It is an ``infra_fault`` when every attempt was lost, or when the request's deadline passes
            first; then the message says whether the grading had begun.

        Raises:
            RuntimeError: the executor is closed.
        """
        waiter = self._stored(request) or self._enter(request)
        try:
            waiter.admitted.wait()
        except BaseException:  # Ctrl-C
            waiter.future.cancel()
            raise
        return waiter.future

    async def asubmit(self, request: Request) -> Outcome:
        """Grade a request. It is admitted to the queue by priority too when ``capacity`` gradings wait.

        Cancelling the task cancels the request.

        Args:
            request: the submission to grade.

        Returns:
            The outcome, as the future of ``submit`` has it.

        Raises:
            UsageError: the grader refuses the request.
            RuntimeError: the executor is closed, or was closed before the outcome.
        """
        stored = await asyncio.to_thread(self._stored, request) if self._store else None  # the file may be locked
        waiter = stored or self._enter(request)
        try:
            return await asyncio.wrap_future(waiter.future)
        except asyncio.CancelledError:
            waiter.future.cancel()
            task = asyncio.current_task()
            if task is not None and not task.cancelling():  # the future was cancelled, not the task
                raise RuntimeError("the executor was closed before the verdict") from None
            raise

    async def stream(self, requests: Iterable[Request]) -> AsyncIterator[tuple[Request, Outcome]]:
        """Yield each request with its outcome, in the order in which the gradings end.

        When the caller stops early, unfinished requests are cancelled as soon as the generator is closed
        (``contextlib.aclosing``).

        Args:
            requests: read lazily, only as far as workers and queue have room.

        Yields:
            Pairs of request and outcome.
        """
        rest = iter(requests)
        pending: dict[asyncio.Task[Outcome], Request] = {}
        try:
            while True:
                for request in itertools.islice(rest, self._width + self._capacity - len(pending)):
                    pending[asyncio.create_task(self.asubmit(request))] = request
                if not pending:
                    return
                ended, _ = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                for task in ended:
                    yield pending.pop(task), task.result()
        finally:
            for task in pending:
                task.cancel()
            await asyncio.gather(*pending, return_exceptions=True)

    def grade_many(self, requests: Iterable[Request], progress: bool = True) -> list[Outcome]:
        """Grade requests that are all submitted at once, whatever the capacity.

        Args:
            requests: the submissions to grade.
            progress: show a progress bar on stderr, if stderr is a terminal.

        Returns:
            The outcomes, in the order of the requests.

        Raises:
            UsageError: the grader refuses a request; no further grading begins.
            KeyboardInterrupt: on Ctrl-C; no further grading begins, and finished gradings are in the store.
        """
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        requests = list(requests)
        console = Console(stderr=True)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        futures: list[Future[Outcome]] = []
        with Progress(*columns, console=console, disable=not (progress and console.is_terminal)) as bar:
            bar_task = bar.add_task("grading", total=len(requests))
            try:
                for request in requests:
                    futures.append((self._stored(request) or self._enter(request)).future)
                    futures[-1].add_done_callback(lambda _: bar.advance(bar_task))
                return [f.result() for f in futures]
            except BaseException:
                for f in futures:
                    f.cancel()
                raise

    def close(self) -> None:
        """Cancel gradings that have not begun, and close the pool. Finished gradings are in the store."""
        with self._lock:
            self._closed = True
            waiters = [w for job in self._waiting.clear() for w in job.waiters] + self._blocked.clear()
        for waiter in waiters:
            waiter.future.cancel()
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._pool.close()
        self._threads.shutdown(wait=True)
        self._timer.close()

    def __enter__(self) -> Executor:
        """Return the executor itself."""
        return self

    def __exit__(self, *exc: object) -> None:
        """Close the executor."""
        self.close()

    def has_outcome(self, request: Request) -> bool:
        """Tell whether the store has the outcome of a request, so that ``submit`` would not grade it.

        Args:
            request: the request.

        Returns:
            Whether it has; false without a store.
        """
        store = self._store
        return store is not None and (store.get(request.key) or store.same(request.record, request.source)) is not None

    # -- into the queue and out of it ------------------------------------------------------

    def _mark_own_thread(self) -> None:
        self._thread_local.own = True

    def _outcome_from_store(self, request: Request) -> Outcome | None:
        """Return the stored outcome of this request, or of the same source and options for another policy or sample."""
        if self._store is None:
            return None
        stored = self._store.get(request.key)
        if stored is None:
            stored = self._store.same(request.record, request.source)
            if stored is not None:  # gets its own row, because reports count gradings by policy and sample
                self._keep(request, stored)
        return stored

    def _keep(self, request: Request, outcome: Outcome) -> None:
        # A grader without some defence layers says so in its outcomes, but the key of a request does not: such outcomes
        # must not be returned for other requests.
        if self._store is not None and not outcome.manifest.get("without"):
            self._store.put(request.key, request.policy, request.sample, request.record, request.source, outcome)

    def _stored(self, request: Request) -> Waiter | None:
        """Return a waiter that already has its outcome, if the store has one."""
        outcome = self._outcome_from_store(request)
        if outcome is None:
            return None
        waiter = Waiter(request, "", math.inf)
        waiter.future.set_result(outcome)
        waiter.admitted.set()
        return waiter

    def _enter(self, request: Request) -> Waiter:
        """Return a waiter, which is admitted to the queue or blocked."""
        until = math.inf if request.deadline is None else time.monotonic() + request.deadline
        waiter = Waiter(request, request.content, until)
        waiter.future.add_done_callback(lambda _: self._on_done(waiter))
        with self._lock:
            if self._closed:
                raise RuntimeError("the executor is closed")
            waiter.order = next(self._orders)
            has_room = len(self._waiting) < self._capacity
            if waiter.content in self._jobs or has_room or hasattr(self._thread_local, "own"):
                self._admit(waiter)
            else:
                self._blocked.put(waiter, request.priority, waiter.order)
        if until < math.inf:
            self._timer.set(waiter)
        return waiter

    def _admit(self, waiter: Waiter) -> None:
        job = self._jobs.get(waiter.content)
        if job is None:
            job = self._jobs[waiter.content] = Job(waiter.request, waiter.content, waiter.order)
            self._threads.submit(self._work)
        job.waiters.append(waiter)
        waiter.job = job
        if not job.began:
            self._waiting.put(job, job.priority, job.order)
        waiter.admitted.set()

    def _admit_blocked(self) -> None:
        while not self._closed and len(self._waiting) < self._capacity and (waiter := self._blocked.take()):
            self._admit(waiter)

    def _on_done(self, waiter: Waiter) -> None:
        if waiter.future.cancelled():
            waiter.future.set_running_or_notify_cancel()  # wakes callers of concurrent.futures.wait
            with self._lock:
                self._drop(waiter)

    def _drop(self, waiter: Waiter) -> None:
        """Take a waiter out of the queue, unless its grading has begun. Other waiters of the grading stay."""
        self._blocked.drop(waiter)
        job = waiter.job
        if job is not None and not job.began and waiter in job.waiters:
            job.waiters.remove(waiter)
            if job.waiters:
                self._waiting.put(job, job.priority, job.order)
            else:
                self._waiting.drop(job)
                self._jobs.pop(job.content, None)
                self._admit_blocked()
        waiter.admitted.set()

    def _expire(self, waiter: Waiter) -> None:
        self._mark_own_thread()  # runs in the thread of the timer, which must not block in a done-callback
        with self._lock:
            began = waiter.job is not None and waiter.job.began
            self._drop(waiter)
        self._settle(waiter, _deadline_outcome(waiter.request, began))

    # -- grading ---------------------------------------------------------------------------

    def _work(self) -> None:
        """Grade the first job of the queue, and give the outcome to its waiters."""
        with self._lock:
            job = self._waiting.take()
            if job is None:  # its request was cancelled
                return
            job.began = True
            self._admit_blocked()
        outcome: Outcome | None = None
        error: BaseException | None = None
        try:
            outcome = self._attempt(job)
        except BaseException as e:
            error = e
        with self._lock:
            self._jobs.pop(job.content, None)
        for waiter in job.waiters:
            if outcome or error or not waiter.future.done():
                self._settle(waiter, outcome or _deadline_outcome(waiter.request, True), error)

    def _settle(self, waiter: Waiter, outcome: Outcome, error: BaseException | None = None) -> None:
        request = waiter.request
        try:
            if error is None:
                self._keep(request, outcome)
        except Exception as e:
            error = e
        try:
            if error is not None:
                waiter.future.set_exception(error)
            else:
                waiter.future.set_result(outcome)
        except InvalidStateError:  # cancelled, or its deadline has passed
            pass

    def _attempt(self, job: Job) -> Outcome | None:
        """Grade until an outcome is final or the attempts are used up.

        Args:
            job: began, so that it is no longer in the queue.

        Returns:
            The outcome, or ``None`` when the deadlines of all waiters have passed.
        """
        request, attempt, outcome = job.request, 1, None
        faults: list[str] = []
        while attempt <= self._attempts and not (outcome and self._closed):
            start = time.monotonic()
            with self._lock:
                left = job.until() - start
            if left < _LEAST_SECONDS:
                return outcome if left == -math.inf else None
            try:
                outcome = self._pool.grade(request, min(left, self._deadline))
            except WorkerLost as e:
                if left <= self._deadline and time.monotonic() > start + left - _LEAST_SECONDS:
                    continue  # ended at the waiters' deadline; a waiter that joined meanwhile may have a later one
                outcome = _infra_outcome(request, str(e), FaultKind.WORKER_LOST)
            except UsageError:
                raise
            except Exception as e:  # a fault of the grader never counts against a submission
                outcome = _infra_outcome(request, f"{GRADER_FAILED}: {type(e).__name__}: {e}", FaultKind.GRADER_FAILED)
            outcome = numbered(outcome, attempt, faults)
            if final(outcome):
                break
            attempt += 1
        return outcome


def _infra_outcome(request: Request, message: str, kind: FaultKind, attempt: int = 1) -> Outcome:
    options = request.options
    return Outcome(
        request.task, Verdict.INFRA_FAULT, Stage.COMPILE, str(options.get("backend", "auto")),
        str(options.get("grading", "contract")), Fault.INFRA, message, manifest={"attempt": attempt}, fault_kind=kind,
    )  # fmt: skip


def _deadline_outcome(request: Request, began: bool) -> Outcome:
    within = f"its deadline of {request.deadline:g} s" if request.deadline else "its deadline"
    if began:
        return _infra_outcome(request, f"no verdict within {within}", FaultKind.DEADLINE)
    return _infra_outcome(request, f"never begun: {within} passed while it waited", FaultKind.DEADLINE, attempt=0)
