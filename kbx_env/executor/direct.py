"""``kbx_env.grade``: grades one source in this process. Also the one place that decides on another attempt."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kbx_env.outcome import Fault, FaultKind, Outcome

if TYPE_CHECKING:
    from kbx_env.grading.grader import Grader

ATTEMPTS = 2
"""Gradings of one source before an infrastructure fault is final."""
_MESSAGE = 300
"""Characters of a fault's message that the next attempt's manifest keeps."""


def final(outcome: Outcome) -> bool:
    """Whether another attempt would come to the same: every verdict, and what the backend cannot execute."""
    return outcome.fault is not Fault.INFRA or outcome.fault_kind is FaultKind.UNSUPPORTED


def numbered(outcome: Outcome, attempt: int, faults: list[str]) -> Outcome:
    """Return the outcome of an attempt, whose manifest names the attempt and the faults of those before it.

    Args:
        outcome: of this attempt.
        attempt: its number, from 1.
        faults: messages of earlier attempts; that of this one is appended if it is lost too.

    Returns:
        The outcome with ``attempt``, and ``faults`` if there were any, in its manifest.
    """
    manifest = {**outcome.manifest, "attempt": attempt}
    if faults:
        manifest["faults"] = list(faults)
    if not final(outcome):
        faults.append(outcome.message[:_MESSAGE])
    return replace(outcome, manifest=manifest)


def retrying(grade: Callable[..., Outcome], attempts: int = ATTEMPTS) -> Callable[..., Outcome]:
    """Return a grade function that repeats a grading which the machine lost.

    Args:
        grade: makes one attempt, such as ``Grader.grade``.
        attempts: at most so many.

    Returns:
        A function with the same arguments.
    """

    @functools.wraps(grade)
    def graded(*args: Any, **options: Any) -> Outcome:
        faults: list[str] = []
        for attempt in range(1, attempts + 1):
            outcome = numbered(grade(*args, **options), attempt, faults)
            if final(outcome):
                break
        return outcome

    return graded


_shared: Grader | None = None


def grade(task_id: str, source: str | bytes, **options: Any) -> Outcome:
    """Grade one source with a warm grader that this process keeps.

    Args:
        task_id: ``category/name``.
        source: the submission, text or raw bytes.
        **options: fields of ``kbx_env.options.GradeOptions``.

    Returns:
        The outcome. An infrastructure fault is tried once more before it is returned.

    Raises:
        UsageError: an unknown task or option, or a value that is refused.
    """
    global _shared
    if _shared is None:
        import atexit

        from kbx_env.grading.grader import Grader

        _shared = Grader()
        atexit.register(_shared.close)
    return retrying(_shared.grade)(task_id, source, **options)
