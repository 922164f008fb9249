"""Runs gradings: one executor (dedupe, attempts, deadlines, store) over small lanes (in-process, processes)."""

from __future__ import annotations

import base64
import importlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from kbx_env.errors import KbxError, UsageError
from kbx_env.outcome import GRADER_FAILED, Fault, Outcome, Stage, Verdict
from kbx_env.store import Store, request_key

GRADER = "kbx_env.grading.grader:Grader"


class LaneLost(KbxError):
    """The place where a grading ran is gone (died, or killed at its deadline); says nothing about the submission."""


@dataclass(frozen=True, eq=False)
class Request:
    """One grading to do. ``options`` are those of ``grade``; ``about`` (policy, versions, ...) only names the record."""

    task: str
    source: bytes
    options: Mapping[str, Any] = field(default_factory=dict)
    about: Mapping[str, Any] = field(default_factory=dict)
    policy: str = ""
    sample: int = 0

    @property
    def content(self) -> str:
        """What is graded: requests of equal content that are under way at the same time share one grading."""
        return request_key({"task": self.task, **self.options}, self.source)

    @property
    def record(self) -> dict[str, Any]:
        """Everything but the source that identifies the stored grading."""
        return {"policy": self.policy, "sample": self.sample, "task": self.task, **self.options, **self.about}

    @property
    def key(self) -> str:
        """The key in the store."""
        return request_key(self.record, self.source)


class Lane(Protocol):
    """A place where gradings run, ``width`` at a time."""

    width: int

    def grade(self, request: Request, deadline: float) -> Outcome:
        """Grade within ``deadline`` seconds, or raise ``LaneLost``."""

    def close(self) -> None:
        """End it."""


class InlineLane:
    """Calls a grade function in this process, one at a time; its own wall limit bounds it, not the deadline."""

    def __init__(self, grade: Callable[..., Outcome], width: int = 1) -> None:
        self._grade, self.width = grade, width

    def grade(self, request: Request, deadline: float) -> Outcome:
        """Grade here."""
        return self._grade(request.task, request.source, **request.options)

    def close(self) -> None:
        """Nothing to end: the function belongs to the caller."""


class ProcessLane:
    """Worker processes with a warm grader each. They talk JSON lines: nothing of a submission is unpickled.

    A worker that dies or misses its deadline is killed with its group and replaced on the next request.
    """

    def __init__(self, workers: int, grader: str = GRADER) -> None:
        self.width, self._grader = workers, grader
        self._idle: queue.SimpleQueue[_Worker | None] = queue.SimpleQueue()
        self._all: set[_Worker] = set()
        self._lock, self._closed = threading.Lock(), False
        for _ in range(workers):
            self._idle.put(None)  # started on first use: a short report starts no worker that it does not need

    def grade(self, request: Request, deadline: float) -> Outcome:
        """Grade in a free worker."""
        worker = self._idle.get()
        try:
            if worker is None or not worker.alive:
                worker = self._start()
            outcome = worker.ask(request, deadline)
            if outcome.fault is Fault.INFRA and outcome.message.startswith(GRADER_FAILED):
                # An error of CUDA stays in its process for good: the next attempt gets a new one.
                worker.kill()
            return outcome
        except LaneLost:
            worker = None
            raise
        finally:
            self._idle.put(worker)

    def _start(self) -> _Worker:
        with self._lock:
            if self._closed:
                raise LaneLost("the lane is closed")
            self._all = {w for w in self._all if w.alive}
            worker = _Worker(self._grader, max(1, (os.cpu_count() or 1) // self.width))
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

    def __init__(self, grader: str, threads: int) -> None:
        root = str(Path(__file__).resolve().parent.parent)
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))}
        # Each worker's torch would take every core: on 2 cores, 2 workers were half as fast as with one thread each.
        env.setdefault("OMP_NUM_THREADS", str(threads))
        # A session of its own: Ctrl-C reaches the parent alone, which then ends the workers in order.
        self._process = subprocess.Popen(
            [sys.executable, "-m", "kbx_env.executor", grader],
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

    def ask(self, request: Request, deadline: float) -> Outcome:
        assert self._process.stdin and self._process.stdout
        data = {"task": request.task, "source": base64.b64encode(request.source).decode(), "options": request.options}
        late = threading.Event()

        def too_late() -> None:
            late.set()
            self.kill()

        timer = threading.Timer(deadline, too_late)
        timer.daemon = True
        timer.start()
        try:
            self._process.stdin.write(json.dumps(data, default=list).encode() + b"\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
            reply = json.loads(line) if line.endswith(b"\n") else None
            if reply and "usage" in reply:
                raise UsageError(reply["usage"])
            if reply and "error" in reply:
                raise LaneLost(f"{GRADER_FAILED}: {reply['error']}")
            if reply:
                return Outcome.from_dict(reply["outcome"])
        except (OSError, ValueError, KeyError) as e:
            if isinstance(e, UsageError):
                raise
        finally:
            timer.cancel()
        self.kill()
        raise LaneLost(f"no verdict within {deadline:g} s" if late.is_set() else
                       f"the grading process died (exit {self._process.returncode})")  # fmt: skip


class Executor:
    """Grades requests over a lane: equal ones once, infrastructure faults again, everything kept in the store."""

    def __init__(self, lane: Lane, attempts: int = 2, store: Store | None = None, deadline: float = 120.0) -> None:
        self._lane, self._attempts, self._store, self._deadline = lane, attempts, store, deadline
        self._pool = ThreadPoolExecutor(lane.width, thread_name_prefix="grade")
        self._flight: dict[str, Future[Outcome]] = {}
        self._lock = threading.Lock()

    def submit(self, request: Request) -> Future[Outcome]:
        """The verdict to come: an ``infra_fault`` outcome when every attempt was lost, never a lost exception.

        What the store knows is not graded again: neither this request, nor the same source under the same options and
        versions from another policy or sample.
        """
        stored = self._known(request)
        if stored is not None:
            done: Future[Outcome] = Future()
            done.set_result(stored)
            return done
        with self._lock:
            shared = self._flight.get(request.content)
            if shared is None:
                shared = self._flight[request.content] = self._pool.submit(self._attempt, request)
        mine: Future[Outcome] = Future()
        shared.add_done_callback(lambda f: self._finish(f, request, mine))
        return mine

    def _known(self, request: Request) -> Outcome | None:
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

    def _finish(self, shared: Future[Outcome], request: Request, mine: Future[Outcome]) -> None:
        with self._lock:
            if self._flight.get(request.content) is shared:
                del self._flight[request.content]
        if shared.cancelled():
            mine.cancel()
            return
        try:
            outcome = shared.result()
            self._keep(request, outcome)
        except BaseException as e:
            mine.set_exception(e)
        else:
            mine.set_result(outcome)

    def _attempt(self, request: Request) -> Outcome:
        for attempt in range(1, self._attempts + 1):
            try:
                outcome = self._lane.grade(request, self._deadline)
            except LaneLost as e:
                outcome = _infra(request, str(e), attempt)
            except UsageError:
                raise
            except Exception as e:  # a fault of the grader is never held against a submission
                outcome = _infra(request, f"{GRADER_FAILED}: {type(e).__name__}: {e}", attempt)
            if outcome.fault is not Fault.INFRA or outcome.message.startswith("unsupported"):
                break  # what the backend cannot do, it cannot do a second time either
        return outcome

    def close(self) -> None:
        """Give up what has not begun and end the lane; what has ended is in the store."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._lane.close()
        self._pool.shutdown(wait=True)

    def __enter__(self) -> Executor:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _infra(request: Request, message: str, attempt: int) -> Outcome:
    options = request.options
    return Outcome(
        request.task, Verdict.INFRA_FAULT, Stage.COMPILE, str(options.get("backend", "auto")),
        str(options.get("grading", "contract")), Fault.INFRA, message, manifest={"attempt": attempt},
    )  # fmt: skip


def _serve(spec: str) -> None:
    """The worker's loop: a request a line in, a verdict a line out."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints must not land between the verdicts
    module, _, name = spec.partition(":")
    grader = getattr(importlib.import_module(module), name)()
    try:
        for line in sys.stdin:
            ask = json.loads(line)
            try:
                outcome = grader.grade(ask["task"], base64.b64decode(ask["source"]), **ask["options"])
                reply: dict[str, Any] = {"outcome": outcome.to_dict()}
            except UsageError as e:
                reply = {"usage": str(e)}
            except Exception as e:
                reply = {"error": f"{type(e).__name__}: {e}"}
            answers.write(json.dumps(reply) + "\n")
            answers.flush()
    except BrokenPipeError:  # the parent is gone
        pass
    finally:
        grader.close()


if __name__ == "__main__":
    _serve(sys.argv[1])
