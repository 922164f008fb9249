"""The outcome of a grading while it is being formed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from kbx_env.grading.timing.gpu_lock import GpuHold
from kbx_env.outcome import (
    Build,
    CaseFailure,
    Cases,
    Estimate,
    Evidence,
    Fault,
    FaultKind,
    Outcome,
    Stage,
    Timing,
    Verdict,
    Violation,
)
from kbx_env.protocol import wire
from kbx_env.spec.task import Task

_SHOWN_FAILURES = 8
"""Failed cases that an outcome lists."""


@dataclass
class OutcomeBuilder:
    """The facts found so far; ``end`` makes an ``Outcome`` of them.

    Attributes:
        task: the graded task.
        backend: ``cpu`` or ``cuda``.
        grading: ``contract`` or ``paper``.
        sha: SHA-256 of the source in hexadecimal.
        manifest: versions and settings of this grading.
        seconds: wall time by stage.
        passed: cases passed, of ``total``.
        telling_passed: telling cases passed, of ``telling``.
        gpu: this grading's use of the GPU, whose waiting and holding times go into the outcome.
        stopped_at: number of the case, from 1, at which an error ended the run; ``None`` if none did.
        stopped_in: label of that case, and its layouts.
    """

    task: Task
    backend: str
    grading: str
    sha: str
    manifest: dict[str, Any]
    seconds: dict[str, float] = field(default_factory=dict)
    passed: int = 0
    total: int = 0
    telling_passed: int = 0
    telling: int = 0
    failures: list[CaseFailure] = field(default_factory=list)
    violations: list[Violation] = field(default_factory=list)
    builds: list[Build] = field(default_factory=list)
    evidence: Evidence | None = None
    timing: Timing | None = None
    estimate: Estimate | None = None
    gpu: GpuHold | None = None
    slips: tuple[str, ...] | None = None
    stopped_at: int | None = None
    stopped_in: str = ""

    def failed_timed_case(self, reason: str) -> None:
        """Count the case in which a timed call was wrong as one more telling case that failed.

        All cases before it passed. Without it a kernel that is wrong only while it is timed would count as many passed
        cases as a right one.

        Args:
            reason: why the result was wrong.
        """
        self.total, self.telling = self.total + 1, self.telling + 1
        self.failures.append(CaseFailure("timed", reason))

    def cases(self) -> Cases | None:
        """Return the cases so far, ``None`` before the first."""
        if not self.total:
            return None
        return Cases(
            self.passed, self.total, tuple(self.failures[:_SHOWN_FAILURES]), self.telling_passed, self.telling,
            self.stopped_at, self.stopped_in,
        )  # fmt: skip

    def end(self, verdict: Verdict, stage: Stage, message: str = "", fault_kind: FaultKind | None = None) -> Outcome:
        """Return the outcome, with everything found so far.

        Args:
            verdict: the verdict.
            stage: the stage that ended the grading.
            message: the reason, for people.
            fault_kind: of an infrastructure fault.

        Returns:
            The outcome. Only a correct one keeps its timing.
        """
        if self.gpu is not None and self.gpu.contended:
            self.seconds |= {"waited": self.gpu.waited} | self.gpu.spent
        fault = None if verdict is Verdict.CORRECT else Fault.INFRA if verdict is Verdict.INFRA_FAULT else Fault.POLICY
        return Outcome(
            task=self.task.id, verdict=verdict, stage=stage, backend=self.backend, grading=self.grading, fault=fault,
            message=wire.clean(message), cases=self.cases(),
            violations=tuple(self.violations), compile=tuple(self.builds),
            timing=self.timing if verdict is Verdict.CORRECT else None, evidence=self.evidence, estimate=self.estimate,
            seconds={k: round(v, 4) for k, v in self.seconds.items()}, manifest=self.manifest, source_sha256=self.sha,
            slips=self.slips, fault_kind=fault_kind,
        )  # fmt: skip
