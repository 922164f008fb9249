"""Validates the replies of a runner, which are untrusted. A reply that makes no sense ends the grading with a verdict."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from kbx_env.errors import KbxError
from kbx_env.grading.runtime.engine_client import EngineError
from kbx_env.outcome import Build, FaultKind, Verdict, Violation
from kbx_env.protocol import wire


class GradingAborted(Exception):
    """Ends a grading before its last stage: an error of the submission, a timeout, a violation, or an unsupported kernel.

    Args:
        verdict: the verdict.
        message: the reason, for people.
        violations: rules that the submission broke.
        fault_kind: of an infrastructure fault.

    Attributes:
        error: type and text of the exception that the submission raised in a call; ``None`` for other endings.
    """

    def __init__(
        self, verdict: Verdict, message: str, violations: Sequence[Violation] = (), fault_kind: FaultKind | None = None
    ) -> None:  # fmt: skip
        super().__init__(message)
        self.verdict, self.message, self.violations = verdict, message, tuple(violations)
        self.fault_kind = fault_kind
        self.error: tuple[str, str] | None = None


@contextlib.contextmanager
def survived() -> Iterator[None]:
    """Ignore a runtime error in the block: an ablated call may fail, because its host code may read an unwritten length."""
    try:
        yield
    except GradingAborted as stop:
        if stop.verdict is not Verdict.RUNTIME_ERROR or stop.violations:
            raise


@contextlib.contextmanager
def readable() -> Iterator[None]:
    """Turn an error of reading a reply into a verdict: a runner may send anything, and the grader must not fail."""
    try:
        yield
    except (KbxError, GradingAborted, EngineError, MemoryError, OSError):  # raised on purpose, or the machine's
        raise
    except Exception as e:
        message = f"the submission's process sent an unreadable result ({type(e).__name__}: {e})"[:300]
        raise GradingAborted(Verdict.RUNTIME_ERROR, message) from None


def count(value: Any) -> int:
    """Return a claimed count.

    Args:
        value: from a reply.

    Returns:
        The same number.

    Raises:
        wire.WireError: not a whole number that fits 53 bits.
    """
    if type(value) is not int or not 0 <= value < 1 << 53:
        raise wire.WireError(f"not a count: {str(value)[:40]!r}")
    return value


def pairs(value: Any) -> list[tuple[str, str]]:
    """Return denied operations as (rule, detail); an unreadable list is a denial itself."""
    try:
        return [(str(r)[:60], str(d)[:300]) for r, d in list(value)[:100]]
    except (TypeError, ValueError):
        return [("tampering", "the log of denied operations is unreadable")]


def build(row: Any) -> Build:
    """Return a claimed ahead-of-time build with its texts cut and its numbers checked."""

    def number(key: str) -> int | None:
        return None if row.get(key) is None else count(row[key])

    error, seconds, warps = row.get("error"), row.get("seconds"), number("warps")
    timed = isinstance(seconds, int | float) and 0 <= seconds < 1e6  # not NaN either
    return Build(
        kernel=str(row["kernel"])[:200], target=str(row["target"])[:20], ok=row["ok"] is True,
        error=None if error is None else str(error)[:500], registers=number("registers"), spills=number("spills"),
        shared=number("shared"), shared_limit=number("shared_limit"),
        seconds=float(seconds) if timed else None,
        # Not always a power of two (warp specialisation); no target runs a program of more than 1024 threads.
        specialisation=str(row.get("specialisation") or "")[:300],
        warps=warps if warps is not None and 1 <= warps <= 32 else None,
    )  # fmt: skip
