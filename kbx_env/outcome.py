"""What a grading said: frozen records, JSON both ways. A missing number is ``None``, never 0."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

GRADER_FAILED = "the grader failed"
"""Begins the message of a fault of the grading process itself (``FaultKind.GRADER_FAILED``)."""


class Verdict(StrEnum):
    """The one-word answer."""

    CORRECT = "correct"
    INCORRECT = "incorrect"
    REJECTED = "rejected"
    COMPILE_ERROR = "compile_error"
    RUNTIME_ERROR = "runtime_error"
    TIMEOUT = "timeout"
    MALFORMED = "malformed"
    INFRA_FAULT = "infra_fault"


class Fault(StrEnum):
    """Who is to blame for a verdict other than correct."""

    POLICY = "policy"
    """Bad source, wrong result, cheat, its own hang or crash: the policy pays."""
    INFRA = "infra"
    """Dead worker, out of memory by a neighbour, unsupported on this backend: masked, never punished."""


class FaultKind(StrEnum):
    """The cause of an infrastructure fault. It decides on another attempt; the message is for people."""

    UNSUPPORTED = "unsupported"
    """The backend cannot execute this kernel, now or later: it is not tried again."""
    SANDBOX = "sandbox"
    """A process of the sandbox did not start or was killed from outside, or the machine's memory or disk is full."""
    GRADER_FAILED = "grader_failed"
    """The grading process raised. It is replaced: an error of CUDA stays in a process for good."""
    WORKER_LOST = "worker_lost"
    """The worker that graded has died or was killed at its deadline."""
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
    """A rule that the submission broke."""

    rule: str
    detail: str


@dataclass(frozen=True)
class CaseFailure:
    """One failed case. Holds sizes and errors, never input values."""

    case: str
    reason: str


@dataclass(frozen=True)
class Cases:
    """Correctness cases, over every repeat.

    ``telling`` counts the cases on which no constant and no copy of an input would be right: only their passing
    says anything about the kernel.
    """

    passed: int
    total: int
    failures: tuple[CaseFailure, ...] = ()
    telling_passed: int | None = None
    telling: int | None = None


@dataclass(frozen=True)
class Build:
    """One kernel, compiled ahead of time for one target. Registers per thread, spills and shared memory in
    bytes; ``None`` where the target's tools do not tell.

    ``warps`` of a program, as compiled: of 32 threads, on AMD of 64. ``None`` where nothing was compiled, and in gradings
    of before it was recorded.
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


@dataclass(frozen=True)
class CaseTime:
    """Timing of one case. Times in microseconds of device time (median), ratios are eager / candidate."""

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
    """The clocks were throttled for the hardware's sake, or another process computed meanwhile, in every attempt."""
    void: bool = False
    """Nearer to the physical roofline than any kernel known: not believed until a person has explained it."""
    ideal_bytes: int | None = None
    """Bytes that any kernel must move in this case."""
    flops: int | None = None
    """Operations that the task must do in this case, from its declaration."""
    compiled_us: float | None = None
    """The torch.compile'd baseline, when asked for: ``eager_us`` times a ratio compiled / eager that was measured in pairs."""


@dataclass(frozen=True)
class Timing:
    """Speedup over torch eager on the same device: geometric mean over the timed cases, 95 % interval."""

    speedup: float
    low: float
    high: float
    floor_ratio: float | None
    """The largest speedup that the device's physical limits allow; ``None`` where they are not known."""
    cases: tuple[CaseTime, ...]
    device: str
    before: Mapping[str, Any] | None = None
    """Clocks, temperature, power, throttling and other processes as the driver tells them before timing; ``None`` where it
    does not."""
    after: Mapping[str, Any] | None = None
    notes: tuple[str, ...] = ()
    compiled_speedup: float | None = None
    """Speedup over the torch.compile'd baseline: geometric mean, ``None`` unless it is known for every case. Never paid."""
    roofline: Mapping[str, Any] | None = None
    """The device's physical limits and measured ceilings, with where they come from (``kbx_env.grading.timing.roofline.Roofline``);
    ``None`` in outcomes from before they were kept."""

    @property
    def void(self) -> bool:
        """Whether a case's time is not believed: nothing is paid for it, the reward is masked, and a person should look."""
        return any(c.void for c in self.cases)


@dataclass(frozen=True)
class Finding:
    """A fault in a kernel that a run on a GPU would not report.

    ``kind`` is out_of_bounds, uninitialised_read, decides_on_unwritten, write_conflict, order_dependent or reordered;
    ``program`` the coordinates of the program; ``index`` the element of ``tensor``; ``by`` the bytes by which an access lies
    outside. ``indirect``: the address depends on loaded values, which index and distance would give away: both are ``None``.
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
    """An estimate of one timing case: never a measurement. ``floor_us`` is what the datasheet's peaks allow at best."""

    case: str
    estimated_us: float
    floor_us: float
    launches: int
    bound_by: str


@dataclass(frozen=True)
class Estimate:
    """Estimated device time on a named GPU, from a cost model, on a machine without one.

    ``estimated_share`` is the geometric mean over the cases of floor / estimate, at most 1: how near to the roofline.
    ``constants`` says where the model's constants come from.
    """

    device: str
    estimated_us: float
    estimated_share: float
    cases: tuple[CaseEstimate, ...]
    constants: str


@dataclass(frozen=True)
class KernelTraffic:
    """What one kernel did, summed over one call of every case. Bytes; ``tensors`` maps a parameter to the bytes loaded,
    stored and updated atomically through it ("" where a pointer may come from several).
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
    """Work of one call of every telling case that passed, summed: what a kernel that is right in some cases does there.

    ``between_bytes`` went through memory that is neither an argument nor a result, in ``buffers`` allocations.
    """

    cases: int
    launches: int
    moved_bytes: int
    ideal_bytes: int
    between_bytes: int
    buffers: int


@dataclass(frozen=True)
class Evidence:
    """What shows that Triton did the work.

    Facts on the CPU tier, where the grader executes the launches: ``stored_share`` (of the elements of all results,
    those that a Triton store wrote), ``depends_on`` (inputs that may reach a result), bytes and operations summed over
    one call of every case (``moved_bytes`` as requested, ``sector_bytes`` in 32-byte sectors, ``reread_bytes`` loaded
    again by the same launch, ``flops`` by unit). ``ablation`` (CUDA) is True when the result went wrong without the
    launches, as it must. ``None``: not known on this backend.

    ``passing`` and, for a quantized task, ``stages`` (name of a stage of the scheme -> share of the wrong telling cases that
    the grader looked at in which it saw the stage hold, see ``grading/evidence/stage_credit.py``) are facts of the CPU tier too.
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
"""Of ``Outcome.slips``, where the text alone says so."""


@dataclass(frozen=True)
class Outcome:
    """The whole verdict on one submission."""

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
    """Of each stage. Two outcomes that differ in nothing else are equal."""
    manifest: Mapping[str, Any] = field(default_factory=dict)
    source_sha256: str = ""
    slips: tuple[str, ...] | None = None
    """Errors that are certain from the text, found by the grader without running it, ``LAUNCHLESS`` among them; ``None`` where it
    could not be read, and in outcomes of before they were looked for."""
    fault_kind: FaultKind | None = None
    """Cause of an infrastructure fault; ``None`` for every other verdict, and in outcomes of before it was kept."""

    def __post_init__(self) -> None:
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
        """Whether the kernel is right and honest."""
        return self.verdict is Verdict.CORRECT

    @property
    def masked(self) -> bool:
        """Whether the outcome has no reward: the machine is to blame, or a time is not believed and waits for a person."""
        return self.fault is Fault.INFRA or (self.timing is not None and self.timing.void)

    @property
    def speedup(self) -> float | None:
        """Geometric-mean speedup over eager, ``None`` where nothing was timed."""
        return self.timing.speedup if self.timing else None

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types, with the derived ``correct`` and ``speedup``."""
        data = _plain(self)
        data["correct"] = self.correct
        data["speedup"] = self.speedup
        return data

    def to_json(self, **extra: Any) -> str:
        """One JSON object; ``extra`` keys are added."""
        return json.dumps(self.to_dict() | extra, allow_nan=False)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Outcome:
        """The inverse of ``to_dict``; unknown keys are ignored."""
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
        return value.value  # one text for all: str() would make a new one each time
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
