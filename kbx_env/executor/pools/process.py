"""Where gradings run: the ``WorkerPool`` protocol, and its two plain forms, in this process and in worker processes."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import queue
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import kbx_env
from kbx_env.errors import KbxError, UsageError
from kbx_env.outcome import GRADER_FAILED, FaultKind, Outcome
from kbx_env.store import request_key

GRADER = "kbx_env.grading.grader:Grader"
CORES = "KBX_CORES"
"""Environment variable that tells a worker its cores."""
START_SECONDS = 300.0
"""A worker that has not got ready by then hangs, and is replaced."""


class WorkerLost(KbxError):
    """The place where a grading ran is gone (died, or killed at its deadline); says nothing about the submission."""


@dataclass(frozen=True, eq=False)
class Request:
    """One grading to do.

    Attributes:
        task: ``category/name``.
        source: the submission.
        options: those of ``grade``.
        about: what else names the record (versions, ...).
        policy: who handed it in.
        sample: which of the policy's answers it is.
        priority: requests of a higher one begin first; equal ones in order of submission.
        deadline: seconds from submission to verdict; ``None``: no limit but that of the executor. Neither of these two
            says what is graded, so no key depends on them.

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

    def __post_init__(self) -> None:
        if not isinstance(self.priority, int):
            raise UsageError(f"priority {self.priority!r} of a request; a whole number, 0 is usual, higher goes first")
        if self.deadline is not None and not (isinstance(self.deadline, int | float) and self.deadline > 0):
            raise UsageError(f"deadline {self.deadline!r} of a request; seconds above 0, or None for no deadline")

    @property
    def _named(self) -> dict[str, Any]:
        """The options as keys spell them: published sizes, all there were once, go without saying."""
        return {k: v for k, v in self.options.items() if (k, v) != ("sizes", "published")}

    @property
    def content(self) -> str:
        """What is graded: requests of equal content that are under way at the same time share one grading."""
        return request_key({"task": self.task, **self._named}, self.source)

    @property
    def record(self) -> dict[str, Any]:
        """Everything but the source that identifies the stored grading."""
        return {"policy": self.policy, "sample": self.sample, "task": self.task, **self._named, **self.about}

    @property
    def key(self) -> str:
        """The key in the store."""
        return request_key(self.record, self.source)


class WorkerPool(Protocol):
    """A place where gradings run, ``width`` at a time."""

    width: int

    def grade(self, request: Request, deadline: float) -> Outcome:
        """Grade within ``deadline`` seconds, or raise ``WorkerLost``."""

    def close(self) -> None:
        """End it."""


class InlinePool:
    """Calls a grade function in this process, one at a time; its own wall limit bounds it, not the deadline."""

    def __init__(self, grade: Callable[..., Outcome], width: int = 1) -> None:
        self._grade, self.width = grade, width

    def grade(self, request: Request, deadline: float) -> Outcome:
        """Grade here."""
        return self._grade(request.task, request.source, **request.options)

    def close(self) -> None:
        """Nothing to end: the function belongs to the caller."""


class ProcessPool:
    """Worker processes with a warm grader each. They talk JSON lines: nothing of a submission is unpickled.

    A worker that dies or misses its deadline is killed with its group and replaced. One that is still getting ready when
    a deadline passes is left to it: else a short deadline would kill every worker before its first verdict.
    """

    def __init__(
        self, workers: int, grader: str = GRADER, ahead: bool = True, env: Mapping[str, str] | None = None,
        cores: Collection[int] | None = None,
    ) -> None:  # fmt: skip
        """A lane of so many processes.

        Args:
            workers: gradings at a time.
            grader: ``module:name`` of what makes a grader without arguments; it has ``grade`` and ``close``, and may have
                ``zygote``, which is called before the first request.
            ahead: start every worker now, and the successor of one that died at once; they get warm in the background.
                Otherwise a worker is started by the first request that finds none.
            env: added to the environment of the workers (which GPU they see, ...).
            cores: on which they run; default: where the system likes.

        Raises:
            UsageError: fewer than one worker.
        """
        if workers < 1:
            raise UsageError(f"{workers} workers; at least 1")
        self.width, self._grader, self._ahead, self._env, self._cores = workers, grader, ahead, dict(env or {}), cores
        self._idle: queue.SimpleQueue[_Worker | None] = queue.SimpleQueue()
        self._all: set[_Worker] = set()
        self._lock, self._closed = threading.Lock(), False
        for _ in range(workers):
            self._idle.put(self._start() if ahead else None)

    def grade(self, request: Request, deadline: float) -> Outcome:
        """Grade in a free worker."""
        worker = self._idle.get()
        try:
            if worker is None or not worker.alive:
                worker = self._start()
            outcome = worker.ask(request, deadline)
            if spent(outcome):
                worker.kill()
            return outcome
        finally:
            self._idle.put(self._successor(worker))

    def ready(self, timeout: float) -> bool:
        """Wait until every idle worker is warm, at most ``timeout`` seconds; for who measures. False: not in time."""
        until = time.monotonic() + timeout
        with self._lock:
            workers = list(self._all)
        return all(w.wait(max(0.0, until - time.monotonic())) for w in workers if w.alive)

    def _successor(self, worker: _Worker | None) -> _Worker | None:
        if worker is None or worker.alive:
            return worker
        try:
            return self._start() if self._ahead else None
        except (WorkerLost, OSError):  # closed, or no process to be had: the next request tries again, and is told
            return None

    def _start(self) -> _Worker:
        with self._lock:
            if self._closed:
                raise WorkerLost("the lane is closed")
            self._all = {w for w in self._all if w.alive}
            many = len(self._cores or ()) or os.cpu_count() or 1
            worker = _Worker(self._grader, max(1, many // self.width), self._env, self._cores)
            self._all.add(worker)
            return worker

    def close(self) -> None:
        """End every worker, busy ones too."""
        with self._lock:
            self._closed = True
            for worker in self._all:
                worker.kill()


class _Worker:
    """One worker process, seen from the lane."""

    def __init__(self, grader: str, threads: int, more: Mapping[str, str], cores: Collection[int] | None = None) -> None:
        root = str(Path(kbx_env.__file__).resolve().parent.parent)
        env = {**os.environ, **more, "PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))}
        # Each worker's torch would take every core: on 2 cores, 2 workers were half as fast as with one thread each.
        env.setdefault("OMP_NUM_THREADS", str(threads))
        if cores:
            env[CORES] = ",".join(map(str, sorted(cores)))
        self._ready, self._began, self._reading = False, time.monotonic(), threading.Lock()
        # A session of its own: Ctrl-C reaches the parent alone, which then ends the workers in order.
        self._process = subprocess.Popen(
            [sys.executable, "-m", "kbx_env.executor.pools.worker", grader],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env, start_new_session=True,
        )  # fmt: skip

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> None:
        """Kill the group; the sandbox behind it ends when its sockets close."""
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except OSError:
            pass
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            # Whoever reads in another thread has met the end by now. What could not be written any more is lost anyway.
            with contextlib.suppress(OSError, ValueError):
                if pipe:
                    pipe.close()

    def wait(self, seconds: float) -> bool:
        """Whether it is warm, or has ended (which asking it tells), within so many seconds."""
        assert self._process.stdout
        poll = select.poll()
        poll.register(self._process.stdout, select.POLLIN)
        if not self._ready and poll.poll(1000 * seconds):
            with self._reading:
                if not self._ready:
                    self._process.stdout.readline()
                    self._ready = True
        return self._ready

    def ask(self, request: Request, deadline: float) -> Outcome:
        """One request, one verdict.

        Raises:
            WorkerLost: it died, or the deadline has passed.
            UsageError: what the grader refuses.
        """
        assert self._process.stdin and self._process.stdout
        start = time.monotonic()
        if not self.wait(deadline):
            if start - self._began > START_SECONDS:
                self.kill()
            raise WorkerLost(f"no verdict within {deadline:g} s: the worker was still starting")
        data = {"task": request.task, "source": base64.b64encode(request.source).decode(), "options": request.options}
        late = threading.Event()

        def too_late() -> None:
            late.set()
            self.kill()

        timer = threading.Timer(max(0.0, start + deadline - time.monotonic()), too_late)
        timer.daemon = True
        timer.start()
        try:
            self._process.stdin.write(json.dumps(data, default=list).encode() + b"\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
            reply = json.loads(line) if line.endswith(b"\n") else None
            if reply:
                return verdict(reply)
        except WorkerLost:
            self.kill()  # what raised may have left anything behind
            raise
        except (OSError, ValueError, KeyError) as e:
            if isinstance(e, UsageError):
                raise
        finally:
            timer.cancel()
        self.kill()
        raise WorkerLost(f"no verdict within {deadline:g} s" if late.is_set() else
                       f"the grading process died (exit {self._process.returncode})")  # fmt: skip


def answer(grader: Any, task: str, source: bytes, options: Mapping[str, Any]) -> dict[str, Any]:
    """What a worker of a lane replies: plain data, whatever the grading came to."""
    try:
        return {"outcome": grader.grade(task, source, **options).to_dict()}
    except UsageError as e:
        return {"usage": str(e)}
    except Exception as e:
        return {"error": f"{type(e).__name__}: {e}"}


def verdict(reply: Mapping[str, Any]) -> Outcome:
    """What a reply of ``answer`` means on the lane's side.

    Raises:
        UsageError: the grader said that the request cannot be graded.
        WorkerLost: the grader failed.
    """
    if "usage" in reply:
        raise UsageError(reply["usage"])
    if "error" in reply:
        raise WorkerLost(f"{GRADER_FAILED}: {reply['error']}")
    return Outcome.from_dict(reply["outcome"])


def spent(outcome: Outcome) -> bool:
    """Whether the process that gave this outcome must not be used again: an error of CUDA stays in it for good."""
    return outcome.fault_kind is FaultKind.GRADER_FAILED
