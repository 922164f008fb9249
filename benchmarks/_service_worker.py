"""Graders for ``benchmarks/service_load.py``: one that answers with a recorded outcome, and the real one with a log."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from typing import Any

from kbx_env.outcome import Outcome


class Grader:
    """Answers after ``KBX_FAKE_SECONDS`` with the outcome in ``KBX_FAKE_OUTCOME``, and writes what it graded to a file."""

    def __init__(self) -> None:
        self._outcome = Outcome.from_dict(json.loads(os.environ["KBX_FAKE_OUTCOME"]))
        self._seconds = float(os.environ["KBX_FAKE_SECONDS"])
        self._log = os.open(os.environ["KBX_FAKE_LOG"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def grade(self, task: str, source: bytes, **options: Any) -> Outcome:
        """Return the recorded outcome."""
        os.write(self._log, b"%d %s\n" % (os.getpid(), source.split(b"\n", 1)[0]))
        time.sleep(self._seconds)
        return replace(self._outcome, task=task)

    def close(self) -> None:
        """Close the file."""
        os.close(self._log)


class Logged:
    """The real grader of the workers, which also writes the first line of every source that it grades to a file."""

    def __init__(self) -> None:
        from kbx_env.grading.grader import Grader as Real

        self._grader = Real()
        self._log = os.open(os.environ["KBX_FAKE_LOG"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def grade(self, task: str, source: bytes, **options: Any) -> Outcome:
        """Grade."""
        os.write(self._log, b"%d %s\n" % (os.getpid(), source.split(b"\n", 1)[0]))
        return self._grader.grade(task, source, **options)

    def close(self) -> None:
        """Close the grader and the file."""
        self._grader.close()
        os.close(self._log)


def unproven() -> Any:
    """Return the real grader without the proof on the CPU tier, for ``benchmarks/service_tiers.py``."""
    from kbx_env.grading.grader import Grader as Real

    return Real(without=["proof"])
