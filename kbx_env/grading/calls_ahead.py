"""Calls of a proof that are made ahead: further sessions with the same submission make them while the first one is at work.

In a session compiler, runner and engine work one after the other, and who waits for one verdict waits for them in every case. Where
cores are idle, further sessions share the calls, and the proof waits for a part of them.
"""

from __future__ import annotations

import contextvars
import queue
import threading
from collections.abc import Callable, Collection, Sequence
from typing import TypeAlias

import torch

from kbx_env.grading.runtime.session import CallResult, RunnerSession
from kbx_env.spec.task import Case

SESSIONS = 2
"""Further sessions of a proof. A third one would wait for Python's lock in the grader more than for its processes."""
WAITING = 4
"""Cases of a session that are called and not judged yet, at most: their arguments and results are in memory."""
_Calls: TypeAlias = Callable[[RunnerSession], list[CallResult]]


class CallsAhead:
    """The further sessions of a proof. ``close`` ends them.

    Args:
        open_session: opens a session with the submission loaded; called in several threads.
    """

    def __init__(self, open_session: Callable[[], RunnerSession]) -> None:
        self._lanes = [_Lane(open_session) for _ in range(SESSIONS)]
        self._lane_of: dict[int, _Lane] = {}

    def begin(self, session: RunnerSession, cases: Sequence[Case], needed: Sequence[int], own: Collection[int]) -> None:
        """Begin to make the calls of all cases but some.

        Args:
            session: of the grading. What the others find out counts as found by it, and they take of its time.
            cases: the cases.
            needed: number of calls of each.
            own: numbers of the cases whose calls ``session`` makes itself.
        """
        left = [index for index in range(len(cases)) if index not in own]
        for number, lane in enumerate(self._lanes):
            mine = left[number :: len(self._lanes)]
            self._lane_of |= dict.fromkeys(mine, lane)
            lane.begin(session, [_calls(cases[index], index, needed[index]) for index in mine])

    def session_of(self, index: int) -> RunnerSession | None:
        """Return the session that makes the calls of a case; ``None`` for a case of the grading's own session."""
        return self._lane_of[index].session if index in self._lane_of else None

    def take(self, index: int) -> list[CallResult]:
        """Wait for the calls of a case. Cases are taken in their order.

        Args:
            index: number of the case.

        Returns:
            One result for each call.

        Raises:
            GradingAborted: the submission ended the grading in this case.
            SandboxError: the machine is to blame.
        """
        return self._lane_of[index].take()

    def __contains__(self, index: int) -> bool:
        """Whether the calls of a case are made ahead."""
        return index in self._lane_of

    def finish(self, session: RunnerSession) -> None:
        """Wait until the sessions have ended, all of whose calls were taken, and add up in ``session`` what they have counted."""
        lanes, self._lanes = self._lanes, []
        for lane in lanes:
            lane.wait()
            if lane.session is not None:
                session.absorb(lane.session)

    def close(self) -> None:
        """End the sessions, also in the middle of a call."""
        for lane in self._lanes:
            lane.stop()
        for lane in self._lanes:
            lane.wait()


class _Lane:
    """A thread with a session of its own.

    Args:
        open_session: opens it.
    """

    def __init__(self, open_session: Callable[[], RunnerSession]) -> None:
        self.session: RunnerSession | None = None
        self._open_session, self._stopped = open_session, False
        self._begun, self._room = threading.Event(), threading.Semaphore(WAITING)
        self._work: tuple[RunnerSession, Sequence[_Calls]] | None = None
        self._made: queue.SimpleQueue[list[CallResult] | Exception] = queue.SimpleQueue()
        run = contextvars.copy_context().run  # what holds in the grader's thread holds here, too
        self._thread = threading.Thread(target=run, args=(self._run,), name="calls-ahead", daemon=True)
        self._thread.start()

    def begin(self, first: RunnerSession, work: Sequence[_Calls]) -> None:
        """Begin to make calls; ``first`` is the session of the grading."""
        self._work = first, work
        self._begun.set()

    def _run(self) -> None:
        torch.set_num_threads(1)  # each thread has a number of its own
        try:
            with self._open_session() as self.session:
                self._begun.wait()
                if self._work is None:
                    return
                first, work = self._work
                self.session.join(first)
                for calls in work:
                    self._room.acquire()
                    if self._stopped:
                        return
                    self._made.put(calls(self.session))
        except Exception as e:
            self._made.put(e)

    def take(self) -> list[CallResult]:
        """Return the next calls that were made, or raise what has ended them."""
        made = self._made.get()
        self._room.release()
        if isinstance(made, Exception):
            raise made
        return made

    def stop(self) -> None:
        """End the calls that are left."""
        self._stopped = True
        if self.session is not None:
            self.session.abandon()
        self._room.release()
        self._begun.set()

    def wait(self) -> None:
        """Wait until the thread has ended its session."""
        self._thread.join()


def _calls(case: Case, index: int, needed: int) -> _Calls:
    return lambda session: session.calls(case, index, needed, "run")
