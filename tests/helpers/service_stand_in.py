"""A stand-in for ``kbx_env.client.Client``: grades in this process, and fails as a service does."""

from __future__ import annotations

from typing import Any

from kbx_env.client import ServiceError
from kbx_env.errors import UsageError
from kbx_env.outcome import Cases, Evidence, Fault, FaultKind, Outcome, Stage, Verdict


def right(task: str, backend: str = "cpu") -> Outcome:
    return Outcome(task, Verdict.CORRECT, Stage.EVIDENCE, backend, "contract", cases=Cases(4, 4, (), 4, 4), evidence=Evidence(1))


def wrong(task: str, passed: int = 2) -> Outcome:
    return Outcome(
        task, Verdict.INCORRECT, Stage.CORRECT, "cpu", "contract", Fault.POLICY, "values differ",
        Cases(passed, 4, (), passed, 4), evidence=Evidence(1),
    )  # fmt: skip


def lost(task: str) -> Outcome:
    # A kernel that the backend does not support is not tried a second time.
    return Outcome(
        task, Verdict.INFRA_FAULT, Stage.COMPILE, "cpu", "contract", Fault.INFRA, "the worker died",
        fault_kind=FaultKind.UNSUPPORTED,
    )  # fmt: skip


def by_word(task: str, source: bytes | str, **options: Any) -> Outcome:
    """Read the verdict in the source. A function of a module, so that it can be pickled."""
    text = source.decode(errors="replace") if isinstance(source, bytes) else source
    return right(task) if "GOOD" in text else lost(task) if "LOST" in text else wrong(task)


class StandIn:
    """Has the methods of ``Client`` that ``RemotePool`` calls."""

    def __init__(self, url: str, token: str | None = None) -> None:
        self.token, self.seen, self.closed = token, list[tuple[str, Any, dict[str, Any]]](), False

    def info(self) -> dict[str, Any]:
        if self.token != "secret":
            raise UsageError("status 401: wrong token")
        return {"backend": "cpu", "environment": {"device": "cpu", "grader": "1"}}

    def grade_within(self, seconds: float, task: str, source: bytes, **options: Any) -> Outcome:
        self.seen.append((task, source, options))
        if b"GONE" in source:
            raise ServiceError("the service failed")
        if b"REFUSED" in source:
            raise UsageError("status 422: no such option")
        return by_word(task, source)

    def close(self) -> None:
        self.closed = True
