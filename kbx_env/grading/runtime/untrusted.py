"""What a runner says is a claim: read with care, and ended with a verdict where it makes no sense."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from kbx_env.errors import KbxError
from kbx_env.grading.runtime.engine_client import EngineError
from kbx_env.outcome import Build, Verdict, Violation
from kbx_env.protocol import wire


class GradingAborted(Exception):
    """The submission ended its own grading: an error, a timeout, a violation."""

    def __init__(self, verdict: Verdict, message: str, violations: Sequence[Violation] = ()) -> None:
        super().__init__(message)
        self.verdict, self.message, self.violations = verdict, message, tuple(violations)


@contextlib.contextmanager
def survived() -> Iterator[None]:
    """An ablated call may fail: host code that reads a length which no kernel wrote finds nonsense there."""
    try:
        yield
    except GradingAborted as stop:
        if stop.verdict is not Verdict.RUNTIME_ERROR or stop.violations:
            raise


@contextlib.contextmanager
def readable() -> Iterator[None]:
    """What a runner sends may be anything: nonsense is its own verdict, not an error of the grader."""
    try:
        yield
    except (KbxError, GradingAborted, EngineError, MemoryError, OSError):  # said on purpose, or the machine's
        raise
    except Exception as e:
        message = f"the submission's process sent an unreadable result ({type(e).__name__}: {e})"[:300]
        raise GradingAborted(Verdict.RUNTIME_ERROR, message) from None


def count(value: Any) -> int:
    """A claimed number of things.

    Raises:
        wire.WireError: not a whole number that fits 53 bits.
    """
    if type(value) is not int or not 0 <= value < 1 << 53:
        raise wire.WireError(f"not a count: {str(value)[:40]!r}")
    return value


def pairs(value: Any) -> list[tuple[str, str]]:
    """Denied operations as claimed; what cannot be read is a denial of its own, never silence."""
    try:
        return [(str(r)[:60], str(d)[:300]) for r, d in list(value)[:100]]
    except (TypeError, ValueError):
        return [("tampering", "the log of denied operations is unreadable")]


def build(row: Any) -> Build:
    """A claimed build."""

    def number(key: str) -> int | None:
        return None if row.get(key) is None else count(row[key])

    error, seconds, warps = row.get("error"), row.get("seconds"), number("warps")
    timed = isinstance(seconds, int | float) and 0 <= seconds < 1e6  # not NaN either
    return Build(
        kernel=str(row["kernel"])[:200], target=str(row["target"])[:20], ok=row["ok"] is True,
        error=None if error is None else str(error)[:500], registers=number("registers"), spills=number("spills"),
        shared=number("shared"), shared_limit=number("shared_limit"),
        seconds=float(seconds) if timed else None,
        # No power of two where warps are specialised; no target runs a program of more than 1024 threads.
        warps=warps if warps is not None and 1 <= warps <= 32 else None,
    )  # fmt: skip
