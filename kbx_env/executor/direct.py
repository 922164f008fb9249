"""``kbx_env.grade``: grades one source in this process. Also decides whether a grading gets another attempt."""

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
_MESSAGE = 1000
"""Characters of a fault's message that the manifest of the next attempt keeps."""


def final(outcome: Outcome) -> bool:
    """Return whether another attempt is pointless: true for all but infrastructure faults, and for unsupported kernels."""
    return outcome.fault is not Fault.INFRA or outcome.fault_kind is FaultKind.UNSUPPORTED


def numbered(outcome: Outcome, attempt: int, faults: list[str]) -> Outcome:
    """Record the attempt and the faults of earlier attempts in the manifest of an outcome.

    Args:
        outcome: of this attempt.
        attempt: its number, from 1.
        faults: messages of earlier attempts; the message of this one is appended if it is not final either.

    Returns:
        A copy with ``attempt`` in its manifest, and ``faults`` if there were any.
    """
    manifest = {**outcome.manifest, "attempt": attempt}
    if faults:
        manifest["faults"] = list(faults)
    if not final(outcome):
        faults.append(outcome.message[:_MESSAGE])
    return replace(outcome, manifest=manifest)


def retrying(grade: Callable[..., Outcome], attempts: int = ATTEMPTS) -> Callable[..., Outcome]:
    """Make a grade function that tries again after an infrastructure fault.

    Args:
        grade: makes one attempt, such as ``Grader.grade``.
        attempts: the most attempts for one call.

    Returns:
        A function with the signature of ``grade``.
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
"""The grader of this process; made by the first ``grade`` and closed at exit."""


def grade(task_id: str, source: str | bytes, **options: Any) -> Outcome:
    """Grade one source with a warm grader that this process keeps.

    Args:
        task_id: ``category/name``.
        source: the submission, text or raw bytes.
        **options: fields of ``kbx_env.options.GradeOptions``.

    Returns:
        The outcome. After an infrastructure fault the grading is tried once more.

    Raises:
        UsageError: an unknown task or option, or a value that is not accepted.
    """
    global _shared
    if _shared is None:
        import atexit

        from kbx_env.grading.grader import Grader

        _shared = Grader()
        atexit.register(_shared.close)
    return retrying(_shared.grade)(task_id, source, **options)
