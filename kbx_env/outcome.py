"""The result of a grading: frozen records that convert to JSON and back. An unknown number is ``None``, never 0."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

GRADER_FAILED = "the grader failed"
"""Start of the message when the grading process itself failed (``FaultKind.GRADER_FAILED``)."""


class Verdict(StrEnum):
    """The verdict on a submission."""

    CORRECT = "correct"
    INCORRECT = "incorrect"
    REJECTED = "rejected"
    COMPILE_ERROR = "compile_error"
    RUNTIME_ERROR = "runtime_error"
    TIMEOUT = "timeout"
    MALFORMED = "malformed"
    INFRA_FAULT = "infra_fault"


class Fault(StrEnum):
    """Whether the policy or the infrastructure caused a verdict other than correct."""

    POLICY = "policy"
    """Bad source, wrong result, a cheat, a hang or a crash of the submission. The policy gets the reward of a failure."""
    INFRA = "infra"
    """Dead worker, memory used up by another process, kernel unsupported by the backend. Masked: there is no reward."""


class FaultKind(StrEnum):
    """The cause of an infrastructure fault. It decides on another attempt; the message is only for readers."""

    UNSUPPORTED = "unsupported"
    """The backend cannot execute this kernel; there is no other attempt."""
    SANDBOX = "sandbox"
    """A process of the sandbox did not start or was killed from outside, or the machine's memory or disk is full."""
    GRADER_FAILED = "grader_failed"
    """The grading process raised an exception. It is replaced, because an error of CUDA stays in a process."""
    WORKER_LOST = "worker_lost"
    """The worker process died or was killed at its deadline."""
    DEADLINE = "deadline"
    """The request's own deadline passed before a verdict."""


class Stage(StrEnum):
    """The stages of a grading, in order."""

    SCREEN = "screen"
    COMPILE = "compile"
    CORRECT = "correct"
    EVIDENCE = "evidence"
    TIME = "time"


@dataclass(frozen=True)
class Violation:
    """A rule that the submission broke.

    Attributes:
        rule: name of the rule.
        detail: what the submission did, with the line where it is known.
    """

    rule: str
    detail: str


@dataclass(frozen=True)
class CaseFailure:
    """A failed case. Holds sizes and errors, never input values.

    Attributes:
        case: label of the case.
        reason: why it failed.
        layouts: shape and strides of every tensor that is not contiguous, "" if there is none.
    """

    case: str
    reason: str
    layouts: str = ""


@dataclass(frozen=True)
class Cases:
    """Counts of correctness cases, over all repeats.

    A case is telling if no constant and no copy of an input would be right: only passed telling cases are evidence for the
    kernel.

    Attributes:
        passed: number of cases passed.
        total: number of cases run.
        failures: the first failed cases.
        telling_passed: number of telling cases that passed and in which kernels did the work; ``None`` if it was not
            recorded.
        telling: number of telling cases run; ``None`` if it was not recorded.
        stopped_at: number of the case, from 1, at which an error ended the run: later ones were not run. ``None`` if all ran.
        stopped_in: label of that case, and its layouts; "" if all ran.
    """

    passed: int
    total: int
    failures: tuple[CaseFailure, ...] = ()
    telling_passed: int | None = None
    telling: int | None = None
    stopped_at: int | None = None
    stopped_in: str = ""

    @property
    def wrong(self) -> int:
        """Number of cases that ran to their end and failed."""
        return (self.total if self.stopped_at is None else self.stopped_at - 1) - self.passed


@dataclass(frozen=True)
class Build:
    """One kernel, compiled ahead of time for one target. Numbers are ``None`` where the tools of the target do not tell.

    Attributes:
        kernel: name of the kernel.
        target: name of the target.
        ok: whether it compiled.
        error: message of the compiler; ``None`` if it compiled.
        registers: per thread.
        spills: bytes.
        shared: bytes of shared memory.
        shared_limit: bytes of shared memory that the target allows.
        seconds: of compiling. Not compared.
        warps: per program, as compiled; of 32 threads, on AMD of 64. ``None`` where nothing was compiled, and in outcomes
            from before it was recorded.
        specialisation: argument types and constants for which it was compiled, "" if unknown; with the number of those that
            ran, where there were several.
    """

    kernel: str
    target: str
    ok: bool
    error: str | None = None
    registers: int | None = None
    spills: int | None = None
    shared: int | None = None
    shared_limit: int | None = None
    seconds: float | None = field(default=None, compare=False)
    warps: int | None = None
    specialisation: str = ""


@dataclass(frozen=True)
class CaseTime:
    """Timing of one case. Times are medians in microseconds of device time, ratios are eager / candidate.

    Attributes:
        case: label of the case.
        eager_us: time of torch eager.
        candidate_us: time of the submission.
        speedup: the ratio, from paired measurements.
        low: lower end of its 95 % interval.
        high: upper end of its 95 % interval.
        pairs: number of paired measurements.
        floor_us: physical lower bound of the time (roofline); ``None`` if the limits of the device are not known.
        method: how the times were measured.
        disturbed: in every attempt the hardware throttled its clocks, or another process computed on the GPU.
        void: nearer to the roofline than any known kernel: not believed until a person has explained it.
        ideal_bytes: bytes that any kernel must move in this case.
        flops: operations that the task needs in this case, by its declaration.
        compiled_us: time of the torch.compile baseline, if it was measured: ``eager_us`` times a ratio compiled / eager from
            paired measurements.
    """

    case: str
    eager_us: float
    candidate_us: float
    speedup: float
    low: float
    high: float
    pairs: int
    floor_us: float | None = None
    method: str = "events"
    disturbed: bool = False
    void: bool = False
    ideal_bytes: int | None = None
    flops: int | None = None
    compiled_us: float | None = None


@dataclass(frozen=True)
class Timing:
    """Speedup over torch eager on the same device.

    Attributes:
        speedup: geometric mean of eager / candidate over the timed cases.
        low: lower end of its 95 % interval.
        high: upper end of its 95 % interval.
        floor_ratio: the largest speedup that the physical limits of the device allow: geometric mean of eager / roofline over
            the cases with a roofline. ``None`` if there is none.
        cases: the timed cases.
        device: name of the GPU.
        before: clocks, temperature, power, throttling and other processes before timing, as the driver tells them; ``None``
            if it does not.
        after: the same after timing.
        notes: remarks about single cases.
        compiled_speedup: geometric mean of compiled / candidate, for the torch.compile baseline; ``None`` unless it is known
            for every case. No part of any reward but the preset ``milestone``.
        roofline: physical limits and measured ceilings of the device with their sources, as
            ``kbx_env.grading.timing.roofline.Roofline`` has them; ``None`` in outcomes from before it was recorded.
        precision: how precisely it was timed, one of ``kbx_env.options.PRECISIONS``.
    """

    speedup: float
    low: float
    high: float
    floor_ratio: float | None
    cases: tuple[CaseTime, ...]
    device: str
    before: Mapping[str, Any] | None = None
    after: Mapping[str, Any] | None = None
    notes: tuple[str, ...] = ()
    compiled_speedup: float | None = None
    roofline: Mapping[str, Any] | None = None
    precision: str = "report"

    @property
    def void(self) -> bool:
        """Whether the time of a case is not believed. Then the reward is masked, and a person should look at it."""
        return any(c.void for c in self.cases)


@dataclass(frozen=True)
class Finding:
    """A fault in a kernel that a run on a GPU would not report.

    Attributes:
        kind: ``out_of_bounds``, ``uninitialised_read``, ``decides_on_unwritten``, ``write_conflict``, ``lane_conflict``,
            ``order_dependent`` or ``reordered``.
        kernel: name of the kernel.
        line: source line of the access, 0 if unknown.
        file: name of the source file, "" if unknown.
        program: coordinates of the program.
        tensor: name of the tensor that the pointer came from, "" if unknown.
        index: element of the tensor, from its first; ``None`` if ``indirect``.
        by: bytes by which an access lies outside the tensor, 0 for other kinds; ``None`` if ``indirect``.
        detail: what happened, without addresses and values.
        access: ``load``, ``store``, ``atomic``, ``reduce``, ``host`` or ``decision``.
        indirect: whether loaded values decide on the address or the mask: index and distance would reveal them.
        text: the finding in one line.
    """

    kind: str
    kernel: str
    line: int
    file: str
    program: tuple[int, ...]
    tensor: str
    index: int | None = None
    by: int | None = None
    detail: str = ""
    access: str = "load"
    indirect: bool = False
    text: str = ""


@dataclass(frozen=True)
class CaseEstimate:
    """A cost model's estimate of one timing case; never a measurement.

    Attributes:
        case: label of the case.
        estimated_us: microseconds of device time.
        floor_us: microseconds at the peaks of the datasheet.
        launches: kernel launches of one call.
        bound_by: resource that takes most of the time.
    """

    case: str
    estimated_us: float
    floor_us: float
    launches: int
    bound_by: str


@dataclass(frozen=True)
class Estimate:
    """A cost model's estimate of device time on a named GPU, made on a machine without that GPU.

    Attributes:
        device: name of the GPU.
        estimated_us: microseconds of device time, geometric mean over the cases.
        estimated_share: geometric mean over the cases of floor / estimate, at most 1; 1 is the roofline.
        cases: the cases.
        constants: source of the constants of the model.
    """

    device: str
    estimated_us: float
    estimated_share: float
    cases: tuple[CaseEstimate, ...]
    constants: str


@dataclass(frozen=True)
class KernelTraffic:
    """Work of one kernel, summed over one call of every case.

    Attributes:
        kernel: name of the kernel.
        launches: number of launches.
        programs: number of programs.
        moved_bytes: bytes loaded, stored and updated atomically.
        sector_bytes: bytes of the 32-byte sectors that were touched.
        reread_bytes: bytes loaded again by the same launch.
        tensors: bytes loaded, stored and updated atomically, by parameter ("" where a pointer may come from several).
        flops: operations by unit.
    """

    kernel: str
    launches: int
    programs: int
    moved_bytes: int
    sector_bytes: int
    reread_bytes: int
    tensors: Mapping[str, tuple[int, ...]]
    flops: Mapping[str, int]


@dataclass(frozen=True)
class Passing:
    """Work of one call of every telling case that passed, summed.

    Attributes:
        cases: number of such cases.
        launches: number of launches.
        moved_bytes: bytes loaded, stored and updated atomically.
        ideal_bytes: bytes that any kernel must move.
        between_bytes: bytes through memory that is neither an argument nor a result.
        buffers: number of allocations of such memory.
    """

    cases: int
    launches: int
    moved_bytes: int
    ideal_bytes: int
    between_bytes: int
    buffers: int


@dataclass(frozen=True)
class Evidence:
    """Evidence that Triton did the work. ``None`` where the backend cannot know.

    On the CPU tier the grader executes the launches, so that all numbers are facts. Bytes and operations are summed over one
    call of every case.

    Attributes:
        launches: number of kernel launches.
        ablation: CUDA only: whether the result was wrong without the launches, as it must be.
        denied_ops: operations of the submission that were denied.
        moved_bytes: bytes loaded, stored and updated atomically, as requested.
        ideal_bytes: bytes that any kernel must move.
        dots: kinds of matrix products.
        findings: faults that a run on a GPU would not report.
        sector_bytes: bytes of the 32-byte sectors that were touched.
        reread_bytes: bytes loaded again by the same launch.
        flops: operations by unit.
        stored_share: share of the elements of all results that a Triton store wrote.
        depends_on: names of the inputs that may reach a result.
        kernels: work by kernel.
        passing: work of the telling cases that passed.
        stages: for a quantized task, by stage of its scheme: in which share of the wrong telling cases that the grader
            examined the stage held, see ``grading/evidence/stage_credit.py``.
    """

    launches: int
    ablation: bool | None = None
    denied_ops: tuple[str, ...] = ()
    moved_bytes: int | None = None
    ideal_bytes: int | None = None
    dots: tuple[str, ...] = ()
    findings: tuple[Finding, ...] = ()
    sector_bytes: int | None = None
    reread_bytes: int | None = None
    flops: Mapping[str, int] | None = None
    stored_share: float | None = None
    depends_on: tuple[str, ...] | None = None
    kernels: tuple[KernelTraffic, ...] = ()
    passing: Passing | None = None
    stages: Mapping[str, float] | None = None


LAUNCHLESS = "no kernel is launched"
"""Entry of ``Outcome.slips`` for a source that launches no kernel."""


@dataclass(frozen=True)
class Outcome:
    """The result of grading one submission. Outcomes that differ in ``seconds`` alone are equal.

    Attributes:
        task: ``category/name``.
        verdict: the verdict.
        stage: the stage that gave the verdict.
        backend: ``cpu`` or ``cuda``; ``auto`` if it was not resolved before an infrastructure fault.
        grading: the tolerances, as ``GradeOptions.grading`` names them.
        fault: what caused a verdict other than correct; ``None`` for a correct one.
        message: the reason, in words.
        cases: counts of correctness cases; ``None`` if none was run.
        violations: rules that the submission broke.
        compile: ahead-of-time builds.
        timing: speedup; ``None`` unless the kernel is correct and was timed (CUDA only).
        evidence: evidence that Triton did the work; ``None`` if the grading ended before.
        estimate: estimate of device time; ``None`` unless the kernel is correct and an estimate was asked for.
        seconds: wall time by stage, and ``total``. Not compared. Beside the stages: ``cases`` (which cases tell anything),
            ``start`` (processes), ``end`` (of them).
        manifest: versions and settings of the grading.
        source_sha256: hash of the submission, in hex.
        slips: errors that are certain from the text, found without running it; may hold ``LAUNCHLESS``. ``None`` where the
            text could not be read, and in outcomes from before they were recorded.
        fault_kind: cause of an infrastructure fault; ``None`` for other verdicts, and in outcomes from before it was recorded.

    Raises:
        ValueError: fields contradict each other.
    """

    task: str
    verdict: Verdict
    stage: Stage
    backend: str
    grading: str
    fault: Fault | None = None
    message: str = ""
    cases: Cases | None = None
    violations: tuple[Violation, ...] = ()
    compile: tuple[Build, ...] = ()
    timing: Timing | None = None
    evidence: Evidence | None = None
    estimate: Estimate | None = None
    seconds: Mapping[str, float] = field(default_factory=dict, compare=False)
    manifest: Mapping[str, Any] = field(default_factory=dict)
    source_sha256: str = ""
    slips: tuple[str, ...] | None = None
    fault_kind: FaultKind | None = None

    def __post_init__(self) -> None:
        """Check that the fields do not contradict each other."""
        if (self.verdict is Verdict.CORRECT) != (self.fault is None):
            raise ValueError(f"verdict {self.verdict} with fault {self.fault}: only a correct outcome has no fault")
        if self.verdict is Verdict.INFRA_FAULT and self.fault is not Fault.INFRA:
            raise ValueError("an infra_fault verdict needs Fault.INFRA")
        if self.fault_kind is not None and self.fault is not Fault.INFRA:
            raise ValueError(f"fault kind {self.fault_kind} with fault {self.fault}: only an infrastructure fault has a kind")
        if (self.timing is not None or self.estimate is not None) and not self.correct:
            raise ValueError("timing or an estimate without a correct verdict")
        if self.timing is not None and self.estimate is not None:
            raise ValueError("a measurement and an estimate in one outcome")
        if self.correct and (self.cases is None or self.cases.passed != self.cases.total or self.violations):
            raise ValueError("a correct verdict needs every case passed and no violation")

    @property
    def correct(self) -> bool:
        """Whether the verdict is correct."""
        return self.verdict is Verdict.CORRECT

    @property
    def masked(self) -> bool:
        """Whether the outcome has no reward: after an infrastructure fault, or if a time is not believed."""
        return self.fault is Fault.INFRA or (self.timing is not None and self.timing.void)

    @property
    def speedup(self) -> float | None:
        """Geometric-mean speedup over eager; ``None`` if nothing was timed."""
        return self.timing.speedup if self.timing else None

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON types, and ``correct`` and ``speedup``."""
        data = _plain(self)
        data["correct"] = self.correct
        data["speedup"] = self.speedup
        return data

    def to_json(self, **extra: Any) -> str:
        """Return ``to_dict`` as JSON text.

        Args:
            **extra: further keys of the object.

        Returns:
            One JSON object on one line.
        """
        return json.dumps(self.to_dict() | extra, allow_nan=False)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Outcome:
        """Read what ``to_dict`` returned.

        Args:
            data: the JSON object; unknown keys are ignored, optional ones may be missing.

        Returns:
            The outcome.
        """
        d = dict(data)
        return cls(
            task=d["task"], verdict=Verdict(d["verdict"]), stage=Stage(d["stage"]), backend=d["backend"],
            grading=d["grading"], fault=Fault(d["fault"]) if d.get("fault") else None, message=d.get("message", ""),
            cases=_cases(d.get("cases")),
            violations=tuple(Violation(**v) for v in d.get("violations", ())),
            compile=tuple(Build(**b) for b in d.get("compile", ())),
            timing=_timing(d.get("timing")), evidence=_evidence(d.get("evidence")), estimate=_estimate(d.get("estimate")),
            seconds=d.get("seconds", {}), manifest=d.get("manifest", {}), source_sha256=d.get("source_sha256", ""),
            slips=None if d.get("slips") is None else tuple(d["slips"]),
            fault_kind=FaultKind(d["fault_kind"]) if d.get("fault_kind") else None,
        )  # fmt: skip


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, StrEnum):
        return value.value  # shared by all outcomes; str() would make a new text each time
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return value


def _cases(d: Mapping[str, Any] | None) -> Cases | None:
    return d and Cases(**{**d, "failures": tuple(CaseFailure(**f) for f in d.get("failures", ()))})  # type: ignore[return-value]


def _timing(d: Mapping[str, Any] | None) -> Timing | None:
    if not d:
        return None
    return Timing(**{**d, "cases": tuple(CaseTime(**c) for c in d["cases"]), "notes": tuple(d.get("notes", ()))})


def _estimate(d: Mapping[str, Any] | None) -> Estimate | None:
    return Estimate(**{**d, "cases": tuple(CaseEstimate(**c) for c in d["cases"])}) if d else None


def _evidence(d: Mapping[str, Any] | None) -> Evidence | None:
    if not d:
        return None
    fields: dict[str, Any] = dict(d)
    for k in ("denied_ops", "dots"):
        fields[k] = tuple(fields.get(k, ()))
    fields["findings"] = tuple(Finding(**{**f, "program": tuple(f["program"])}) for f in fields.get("findings", ()))
    fields["kernels"] = tuple(
        KernelTraffic(**{**k, "tensors": {n: tuple(b) for n, b in k["tensors"].items()}})
        for k in fields.get("kernels", ())
    )
    if fields.get("depends_on") is not None:
        fields["depends_on"] = tuple(fields["depends_on"])
    if fields.get("passing") is not None:
        fields["passing"] = Passing(**fields["passing"])
    return Evidence(**fields)
