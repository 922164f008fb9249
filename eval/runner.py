"""Asks policies for answers to tasks and grades the answers: many at a time, none lost, none asked for twice."""

from __future__ import annotations

import functools
import hashlib
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from kbx_env.baselines.policy import Episodic

from kbx_env.envs.answer import strip_fences
from kbx_env.envs.episode import Episode, Trajectory
from kbx_env.envs.prompt import instruction
from kbx_env.errors import ModelError, NoAnswer, UsageError
from kbx_env.executor import Executor, Request
from kbx_env.outcome import Fault, Outcome, Stage, Verdict
from kbx_env.spec.task import Task
from kbx_env.store import Store


@dataclass(frozen=True)
class Answer:
    """One graded answer of a policy, with the resources that it took.

    Attributes:
        outcome: the grading.
        gradings: verdicts that the policy received, the final one included.
        seconds: wall time from the question to the answer, including waits on the way, plus the final grading without
            its time in the queue (all answers are queued at once); ``None`` for an answer of an earlier run.
        spent: calls, tokens and dollars; ``None`` for policies that ask no model.
        turns: submissions before the answer.
        notes: of the policy.
    """

    outcome: Outcome
    gradings: int
    seconds: float | None = None
    spent: Mapping[str, Any] | None = None
    turns: tuple[Mapping[str, Any], ...] = ()
    notes: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Asker:
    """Asks one policy and grades its answers.

    Attributes:
        spec: the policy's name on the command line.
        policy: the policy.
        options: of ``grade``.
        about: device and versions, which are part of the store's key.
        store: of gradings.
        executor: of gradings.
        answered: ask only the tasks that the policy says it answers (``Policy.answered``), not all.
    """

    spec: str
    policy: Any
    options: Mapping[str, Any]
    about: Mapping[str, Any]
    store: Store
    executor: Executor
    answered: bool = False

    def asked(self, tasks: Sequence[Task]) -> list[Task]:
        """Choose the tasks that the policy is asked.

        Args:
            tasks: of the report.

        Returns:
            All tasks, or with ``answered`` at least one, in the given order.

        Raises:
            UsageError: the policy answers none of the tasks.
        """
        names = getattr(self.policy, "answered", None) if self.answered else None
        if names is None:
            return list(tasks)
        if not (chosen := [t for t in tasks if t.id in names]):
            some = ", ".join(sorted(names)[:5])
            raise UsageError(f"policy {self.spec!r} answers none of the {len(tasks)} chosen tasks; it answers {some or 'no task'}")
        return chosen

    def samples(self, task: Task) -> int:
        """Return the number of answers to a task that are graded.

        Args:
            task: the task.

        Returns:
            At least 1.

        Raises:
            UsageError: the policy returns something else.
        """
        count = getattr(self.policy, "samples", None)
        samples = count(task.id) if callable(count) else 1
        if type(samples) is not int or samples < 1:
            raise UsageError(f"policy {self.spec!r}: samples({task.id!r}) is {samples!r}; a whole number, at least 1")
        return samples

    def known(self, task: Task) -> Iterator[tuple[int, Answer]]:
        """Yield (sample, answer) of each answer in the store for which the policy need not be asked."""
        if not getattr(self.policy, "repeatable", False):
            for sample, stored in self.store.find_all(self._request(task, b"", 0).record):
                yield sample, Answer(stored, 1)

    def answer(self, task: Task, sample: int, done: Callable[[Answer | BaseException], None]) -> None:
        """Ask for one answer and grade it.

        Args:
            task: the task.
            sample: number of the answer, from 0.
            done: called with the graded answer or an error, perhaps later and from another thread.
        """
        try:
            self._answer(task, sample, done)
        except BaseException as e:
            done(e)

    def _answer(self, task: Task, sample: int, done: Callable[[Answer | BaseException], None]) -> None:
        blank = self._request(task, b"", sample)
        stored = None if getattr(self.policy, "repeatable", False) else self.store.find(blank.record)
        if stored is not None:
            done(Answer(stored, 1))
            return
        try:
            source, trajectory, seconds, known = *self._ask(task, sample), None
        except NoAnswer as e:
            source, trajectory, seconds = None, None, None
            known = self._unanswered(task, Verdict.MALFORMED, f"the policy has no answer: {e}")
        except ModelError as e:  # the model's answer is not known, which is no fault of the policy
            source, trajectory, seconds = None, None, None
            known = self._unanswered(task, Verdict.INFRA_FAULT, str(e))
        if known is None and source is None:
            reason = trajectory.reason if trajectory else ""
            text = "the policy has no answer" + (f": {reason}" if reason else "")
            known = self._unanswered(task, Verdict.MALFORMED, text)
        turns = tuple(t.to_dict() for t in trajectory.turns) if trajectory else ()
        notes = trajectory.notes if trajectory else {}
        spent = self._spent(task, sample)

        def finish(outcome: Outcome, graded: int) -> None:
            judged = outcome.seconds.get("total", 0.0) if graded > len(turns) else 0.0
            done(Answer(outcome, graded, None if seconds is None else seconds + judged, spent, turns, notes))

        if known is not None:
            self.store.put(blank.key, self.spec, sample, blank.record, None, known)
            finish(known, len(turns))
            return
        assert source is not None
        data = source if isinstance(source, bytes) else strip_fences(source, task.entry).encode("utf-8", "surrogatepass")
        # A source that was graded on the way has its verdict: it is not graded a second time.
        more = 0 if turns and any(t["sha"] == _sha(data) for t in turns) else 1
        job = self.executor.submit(self._request(task, data, sample))

        def ended(f: Future[Outcome]) -> None:
            error = f.exception() if not f.cancelled() else None
            if f.cancelled():
                done(InterruptedError("the run was stopped"))
            elif error is not None:
                done(error)
            else:
                finish(f.result(), len(turns) + more)

        job.add_done_callback(ended)

    def _request(self, task: Task, source: bytes, sample: int, policy: str | None = None) -> Request:
        record = {**self.about, "fingerprint": task.fingerprint}
        return Request(task.id, source, self.options, record, policy or self.spec, sample)

    def _ask(self, task: Task, sample: int) -> tuple[str | bytes | None, Trajectory | None, float]:
        start = time.monotonic()
        backend = self.options["backend"]
        try:
            if isinstance(self.policy, Episodic):
                trajectory = self.policy.run(task, Episode(task, backend, self._submit(task, sample), sample=sample))
                source: Any = trajectory.source
            else:
                trajectory = None
                prompt = instruction(task, backend)
                seen = {"task": task.id, "prompt": prompt, "feedback": "", "turn": 0, "sample": sample}
                source = self.policy.act(seen)
        except (NoAnswer, ModelError, UsageError):
            raise
        except (Exception, SystemExit) as e:
            raise UsageError(f"policy {self.spec!r} failed on {task.id}: {type(e).__name__}: {e}") from e
        if not isinstance(source, str | bytes | None):
            raise UsageError(f"policy {self.spec!r} answered {task.id} with a {type(source).__name__}; str, bytes or None")
        return source, trajectory, time.monotonic() - start

    def _submit(self, task: Task, sample: int) -> Callable[[Sequence[str]], list[Outcome]]:
        def submit(sources: Sequence[str]) -> list[Outcome]:
            # A name of their own in the store: the report counts answers, not submissions on the way.
            jobs = [
                self.executor.submit(self._request(task, s.encode("utf-8", "surrogatepass"), sample, f"{self.spec} (on the way)"))
                for s in sources
            ]
            return [j.result() for j in jobs]

        return submit

    def _spent(self, task: Task, sample: int) -> Mapping[str, Any] | None:
        spent = getattr(self.policy, "spent", None)
        found = spent(task.id, sample) if callable(spent) else None
        to_dict = getattr(found, "to_dict", None)
        as_dict: Mapping[str, Any] | None = to_dict() if callable(to_dict) else found
        return as_dict

    def _unanswered(self, task: Task, verdict: Verdict, text: str) -> Outcome:
        fault = Fault.INFRA if verdict is Verdict.INFRA_FAULT else Fault.POLICY
        return Outcome(task.id, verdict, Stage.SCREEN, self.options["backend"], self.options["grading"], fault, text)


def _sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


_Ended = tuple[Asker, str, int, Answer | BaseException]
"""(asker, task, sample, answer or error)."""


def _work(
    asker: Asker, todo: queue.SimpleQueue[tuple[Task, int]], ended: queue.SimpleQueue[_Ended], stop: threading.Event
) -> None:  # fmt: skip
    """Ask one policy until no question is left or ``stop`` is set; a thread's main function."""

    def settle(task: str, sample: int, result: Answer | BaseException) -> None:
        if isinstance(result, BaseException):
            stop.set()  # the error ends the run: no policy is asked again
        ended.put((asker, task, sample, result))

    while not stop.is_set():
        try:
            task, sample = todo.get_nowait()
        except queue.Empty:
            return
        asker.answer(task, sample, functools.partial(settle, task.id, sample))


def ask_all(askers: Sequence[Asker], tasks: Sequence[Task]) -> Iterator[tuple[Asker, str, int, Answer]]:
    """Ask all policies all tasks; each policy as many questions at a time as it allows (``concurrency``).

    The threads are daemons: an answer that takes minutes does not keep an interrupted program from ending.

    Args:
        askers: the policies.
        tasks: the tasks.

    Yields:
        (asker, task, sample, answer) in the order in which answers are graded; answers of an earlier run first.

    Raises:
        UsageError: a policy raised, answers no task, or no request to its model can succeed.
    """
    ended: queue.SimpleQueue[_Ended] = queue.SimpleQueue()
    stop = threading.Event()
    asked = 0
    try:
        for asker in askers:
            todo: queue.SimpleQueue[tuple[Task, int]] = queue.SimpleQueue()
            for task in asker.asked(tasks):
                missing = dict.fromkeys(range(asker.samples(task)))
                for sample, answer in asker.known(task):
                    if sample in missing:
                        del missing[sample]
                        yield asker, task.id, sample, answer
                for sample in missing:
                    todo.put((task, sample))
            asked += todo.qsize()
            for _ in range(min(getattr(asker.policy, "concurrency", 1), todo.qsize())):
                threading.Thread(target=_work, args=(asker, todo, ended, stop), name=f"ask {asker.spec}", daemon=True).start()
        for _ in range(asked):
            by, name, number, result = ended.get()
            if isinstance(result, BaseException):
                raise result
            yield by, name, number, result
    finally:
        stop.set()
