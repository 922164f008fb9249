"""Worker pools run gradings: the ``WorkerPool`` protocol, and pools in this process and in worker processes."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from kbx_env.errors import KbxError, UsageError
from kbx_env.executor.pools.fork_server import ForkServer
from kbx_env.outcome import GRADER_FAILED, FaultKind, Outcome
from kbx_env.protocol.status import READY_BYTES
from kbx_env.spec import packs
from kbx_env.store import request_key

GRADER = "kbx_env.grading.grader:Grader"
"""Default grader of a worker, as ``module:name``."""
START_SECONDS = 300.0
"""A worker that is not ready after so many seconds counts as hung, and is replaced."""


class WorkerLost(KbxError):
    """The worker of a grading died or was killed at its deadline. This says nothing about the submission."""


@dataclass(frozen=True, eq=False)
class Request:
    """A submission to grade. Keys do not depend on ``priority``, ``deadline`` and ``proof``, which do not change the outcome.

    Attributes:
        task: ``category/name``.
        source: the submission.
        options: fields of ``kbx_env.options.GradeOptions`` by name.
        about: further fields of the stored record (versions, ...).
        policy: name of the policy that wrote the submission.
        sample: number of the submission among those of the policy for the task.
        priority: requests with a higher priority begin first, equal priorities in order of submission.
        deadline: seconds from submission to outcome; ``None`` for no limit except the one of the executor.
        proof: outcome of the same source on the CPU tier, made by this project's own worker (``TieredPool``). A grading on
            CUDA then begins after its proof. ``None``: the grading makes the proof itself.

    Raises:
        UsageError: the priority is not a whole number, or the deadline not a number of seconds above 0.
    """

    task: str
    source: bytes
    options: Mapping[str, Any] = field(default_factory=dict)
    about: Mapping[str, Any] = field(default_factory=dict)
    policy: str = ""
    sample: int = 0
    priority: int = 0
    deadline: float | None = None
    proof: Outcome | None = None

    def __post_init__(self) -> None:
        """Check priority and deadline."""
        if not isinstance(self.priority, int):
            raise UsageError(f"priority {self.priority!r} of a request; a whole number, 0 is usual, higher goes first")
        if self.deadline is not None and not (isinstance(self.deadline, int | float) and self.deadline > 0):
            raise UsageError(f"deadline {self.deadline!r} of a request; seconds above 0, or None for no deadline")

    @property
    def _key_options(self) -> dict[str, Any]:
        """The options without those defaults that older keys do not have."""
        return {k: v for k, v in self.options.items() if (k, v) not in (("sizes", "published"), ("precision", "report"))}

    @property
    def content(self) -> str:
        """Key of task, options and source. Requests of equal content that are in progress share one grading."""
        return request_key({"task": self.task, **self._key_options}, self.source)

    @property
    def record(self) -> dict[str, Any]:
        """All fields except the source that identify the stored grading."""
        return {"policy": self.policy, "sample": self.sample, "task": self.task, **self._key_options, **self.about}

    @property
    def key(self) -> str:
        """The key in the store."""
        return request_key(self.record, self.source)


class WorkerPool(Protocol):
    """Runs gradings, ``width`` at a time. Thread-safe.

    Attributes:
        width: gradings that can run at the same time.
    """

    width: int

    def grade(self, request: Request, deadline: float) -> Outcome:
        """Grade a submission.

        Args:
            request: the submission.
            deadline: seconds.

        Returns:
            The outcome.

        Raises:
            WorkerLost: the worker died, or the deadline passed.
            UsageError: the grader refuses the request.
        """

    def close(self) -> None:
        """End all workers, busy ones too."""


class InlinePool:
    """Calls a grade function in this process. The deadline is ignored: the function has its own wall limit."""

    def __init__(self, grade: Callable[..., Outcome], width: int = 1) -> None:
        """Wrap a grade function.

        Args:
            grade: called with task, source and the options; it belongs to the caller.
            width: calls at a time; above 1 the function must be thread-safe.
        """
        self._grade, self.width = grade, width

    def grade(self, request: Request, deadline: float) -> Outcome:
        """Grade in the calling thread.

        Args:
            request: the submission.
            deadline: ignored.

        Returns:
            The outcome.
        """
        return self._grade(request.task, request.source, **request.options)

    def close(self) -> None:
        """Do nothing: the function belongs to the caller."""


class ProcessPool:
    """Worker processes with a warm grader each. They exchange JSON lines, so nothing of a submission is unpickled.

    The workers are forks of one process that has imported the grader (``ForkServer``).

    A worker that dies or misses a deadline is killed with its process group and replaced. A worker that is still starting
    when a deadline passes is kept: otherwise a short deadline would kill every worker before its first outcome.
    """

    def __init__(
        self, workers: int, grader: str = GRADER, ahead: bool = True, env: Mapping[str, str] | None = None,
        cores: Collection[int] | None = None,
    ) -> None:  # fmt: skip
        """Make a pool of worker processes.

        Args:
            workers: number of processes: gradings at a time.
            grader: ``module:name`` of a callable that makes a grader without arguments. A grader has ``grade`` and
                ``close``, and may have ``zygote``, which is called before the first request.
            ahead: start every worker now, and replace one that died at once; they warm up in the background. Otherwise a
                worker starts with the first request that needs it.
            env: environment variables of the workers, added to those of this process.
            cores: CPU cores on which the workers run; by default any.

        Raises:
            UsageError: fewer than one worker.
        """
        if workers < 1:
            raise UsageError(f"{workers} workers; at least 1")
        self.width, self._grader, self._ahead, self._env, self._cores = workers, grader, ahead, dict(env or {}), cores
        self._idle, self._free = deque[_Worker | None](), threading.Semaphore(0)
        self._all: set[_Worker] = set()
        self._lock, self._closed = threading.Lock(), False
        self._server: ForkServer | None = None
        for _ in range(workers):
            self._put_back(self._start() if ahead else None)

    def grade(self, request: Request, deadline: float) -> Outcome:
        """Grade in the free worker that has graded last; wait until one is free.

        Args:
            request: the submission.
            deadline: seconds from the moment a worker is free.

        Returns:
            The outcome.

        Raises:
            WorkerLost: the worker died, the deadline passed, or the pool is closed.
            UsageError: the grader refuses the request.
        """
        worker = self._take()
        try:
            if worker is None or not worker.alive:
                worker = self._start()
            outcome = worker.ask(request, deadline)
            if poisons_worker(outcome):
                worker.kill()
            return outcome
        finally:
            self._put_back(self._successor(worker))

    def ready(self, timeout: float) -> bool:
        """Wait until all workers are warm, so that a benchmark does not measure their start.

        Args:
            timeout: seconds.

        Returns:
            Whether all live workers were warm in time.
        """
        until = time.monotonic() + timeout
        with self._lock:
            workers = list(self._all)
        return all(w.wait(max(0.0, until - time.monotonic())) for w in workers if w.alive)

    def _take(self) -> _Worker | None:
        """Wait for an idle worker and return the one to use next; one that has died only if all idle ones have."""
        self._free.acquire()
        for _ in range(self.width):
            worker = self._idle.pop()
            if worker is None or worker.alive:
                return worker
            self._idle.appendleft(worker)
        return self._idle.pop()

    def _put_back(self, worker: _Worker | None) -> None:
        """Let a warm worker have the next request. If it has graded, it has loaded what gradings need, and on a GPU its next runner
        is ready, or starting.
        """
        if worker is not None and worker.warm:
            self._idle.append(worker)
        else:
            self._idle.appendleft(worker)
        self._free.release()

    def _successor(self, worker: _Worker | None) -> _Worker | None:
        if worker is None or worker.alive:
            return worker
        try:
            return self._start() if self._ahead else None
        except (WorkerLost, OSError):  # closed, or no process: the next request tries again, and gets the error
            return None

    def _start(self) -> _Worker:
        with self._lock:
            if self._closed:
                raise WorkerLost("the worker pool is closed")
            self._all = {w for w in self._all if w.alive}
            if self._server is None or not self._server.alive:
                if self._server is not None:
                    self._server.close()
                cores = len(self._cores or ()) or os.cpu_count() or 1
                self._server = ForkServer(self._grader, max(1, cores // self.width), self._env, self._cores)
            worker = _Worker(self._server)
            self._all.add(worker)
            return worker

    def close(self) -> None:
        """Kill all workers, busy ones too."""
        with self._lock:
            self._closed = True
            for worker in self._all:
                worker.kill()
            if self._server is not None:
                self._server.close()


class _Worker:
    """The pool's handle of one worker process."""

    def __init__(self, server: ForkServer) -> None:
        """Ask for the process.

        Args:
            server: forks it.

        Raises:
            WorkerLost: no file descriptor, or the server has ended.
        """
        self._server, self._began = server, time.monotonic()
        self._ready, self._reading, self._reading_pid = False, threading.Lock(), threading.Lock()
        self._pid: int | None = None
        """Its process id; 0 if the server ended before it forked the worker."""
        self._exit: int | None = None
        """How it ended, once it was killed."""
        with contextlib.ExitStack() as ours, contextlib.ExitStack() as theirs:
            try:
                requests, write = os.pipe()
                theirs.callback(os.close, requests)
                self._requests = ours.enter_context(os.fdopen(write, "wb"))
                read, replies = os.pipe()
                theirs.callback(os.close, replies)
                self._replies = ours.enter_context(os.fdopen(read, "rb"))
                server.fork(requests, replies)
            except OSError as e:
                raise WorkerLost(f"no process for a worker: {e}") from e
            ours.pop_all()

    @property
    def alive(self) -> bool:
        """Whether the process runs, or will be forked."""
        if self._replies.closed:
            return False
        poll = select.poll()
        poll.register(self._replies, select.POLLIN)
        return not any(event & select.POLLHUP for _, event in poll.poll(0))

    @property
    def warm(self) -> bool:
        """Whether it is known to be warm, because somebody has waited for that."""
        return self._ready

    def kill(self) -> None:
        """Kill the process group. The sandbox of the worker ends when its sockets close."""
        if self._replies.closed:
            return
        if not self._has_pid(0.0):
            self._server.close()  # it forks no workers, or very late ones; a fork that begins now meets the end of its requests
        elif self._pid:
            with contextlib.suppress(OSError):
                os.killpg(self._pid, signal.SIGKILL)
            self._exit = self._server.fate(self._pid)
        for pipe in (self._requests, self._replies):
            # Another thread that reads has met the end of the stream by now. Unwritten data is lost anyway.
            with contextlib.suppress(OSError, ValueError):
                pipe.close()

    def wait(self, seconds: float) -> bool:
        """Wait until the worker is warm or has ended; ``ask`` tells the two apart.

        Args:
            seconds: the longest wait.

        Returns:
            Whether it is warm or has ended.
        """
        until = time.monotonic() + seconds
        with self._reading:
            if not self._ready and self._has_pid(seconds) and self._readable(until - time.monotonic()):
                self._replies.readline()
                self._ready = True
        return self._ready

    def _has_pid(self, seconds: float) -> bool:
        """Wait for the process id, which comes first, and return whether it is known."""
        if self._pid is None and self._readable(seconds):
            with self._reading_pid:
                if self._pid is None:
                    # Not through the buffer, which could take what follows as well.
                    self._pid = int.from_bytes(os.read(self._replies.fileno(), READY_BYTES), "little")
        return self._pid is not None

    def _readable(self, seconds: float) -> bool:
        """Wait until there is something to read, or the end of the stream, and return whether there is."""
        poll = select.poll()
        poll.register(self._replies, select.POLLIN)
        return bool(poll.poll(1000 * max(0.0, seconds)))

    def ask(self, request: Request, deadline: float) -> Outcome:
        """Send a request and wait for the outcome.

        Args:
            request: the submission.
            deadline: seconds.

        Returns:
            The outcome.

        Raises:
            WorkerLost: the worker died, or the deadline passed.
            UsageError: the grader refuses the request.
        """
        start = time.monotonic()
        if not self.wait(deadline):
            if start - self._began > START_SECONDS:
                self.kill()
            raise WorkerLost(f"no verdict within {deadline:g} s: the worker was still starting")
        data = {"task": request.task, "source": base64.b64encode(request.source).decode(), "options": request.options}
        if request.proof is not None:
            data["proof"] = request.proof.to_dict()
        data["packs"] = packs.roots()  # the worker may have started before a pack was opened
        timed_out = threading.Event()

        def on_timeout() -> None:
            timed_out.set()
            self.kill()

        timer = threading.Timer(max(0.0, start + deadline - time.monotonic()), on_timeout)
        timer.daemon = True
        timer.start()
        try:
            self._requests.write(json.dumps(data, default=list).encode() + b"\n")
            self._requests.flush()
            line = self._replies.readline()
            reply = json.loads(line) if line.endswith(b"\n") else None
            if reply:
                return outcome_of(reply)
        except WorkerLost:
            self.kill()  # after an error of the grader the state of the process is unknown
            raise
        except (OSError, ValueError, KeyError) as e:
            if isinstance(e, UsageError):
                raise
        finally:
            timer.cancel()
        self.kill()
        raise WorkerLost(f"no verdict within {deadline:g} s" if timed_out.is_set() else
                       f"the grading process died (exit {self._exit})")  # fmt: skip


def reply_of(
    grader: Any, task: str, source: bytes, options: Mapping[str, Any], proof: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Grade in a worker, and put the result or the error into plain data. Never raises an ``Exception``.

    Args:
        grader: has a method ``grade``.
        task: ``category/name``.
        source: the submission.
        options: fields of ``kbx_env.options.GradeOptions`` by name.
        proof: ``Request.proof`` as a JSON object, if there is one.

    Returns:
        A JSON object: ``outcome``, ``usage`` (message of a ``UsageError``) or ``error`` (any other exception).
    """
    try:
        # Beside the options, never among them: options may come from a remote user, a proof only from this project's worker.
        proven = {} if proof is None else {"proof": Outcome.from_dict(proof)}
        return {"outcome": grader.grade(task, source, **proven, **options).to_dict()}
    except UsageError as e:
        return {"usage": str(e)}
    except Exception as e:
        return {"error": f"{type(e).__name__}: {e}"}


def opened(places: Iterable[str]) -> dict[str, Any] | None:
    """Open the task packs of a request in a worker.

    Args:
        places: folders of the packs.

    Returns:
        ``None``, or the reply if a folder is no pack here.
    """
    try:
        packs.register(places)
    except UsageError as e:
        return {"usage": str(e)}
    return None


def outcome_of(reply: Mapping[str, Any]) -> Outcome:
    """Read a reply of ``reply_of``.

    Args:
        reply: the JSON object.

    Returns:
        The outcome.

    Raises:
        UsageError: the grader refused the request.
        WorkerLost: the grader raised any other exception.
    """
    if "usage" in reply:
        raise UsageError(reply["usage"])
    if "error" in reply:
        raise WorkerLost(f"{GRADER_FAILED}: {reply['error']}")
    return Outcome.from_dict(reply["outcome"])


def poisons_worker(outcome: Outcome) -> bool:
    """Return whether the process that gave this outcome must not be used again: an error of CUDA stays in a process."""
    return outcome.fault_kind is FaultKind.GRADER_FAILED
