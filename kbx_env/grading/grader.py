"""One verdict: the stages in order, cheapest first; the first that fails ends the grading."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import platform
import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kbx_env.catalog import load_task
from kbx_env.errors import SandboxError, UnknownName, UsageError
from kbx_env.grading.calls import Claimed, Stopped, Talk
from kbx_env.grading.screen import screen
from kbx_env.grading.tally import Tally
from kbx_env.grading.workers import Zygote
from kbx_env.outcome import (
    Build,
    CaseFailure,
    Cases,
    Evidence,
    Fault,
    Outcome,
    Stage,
    Verdict,
    Violation,
)
from kbx_env.task import Case, Task

BACKENDS = ("auto", "cpu", "cuda")
GRADINGS = ("contract", "paper")
TARGETS = ("sm_80", "sm_90", "sm_100", "sm_120", "gfx942")


def resolve_backend(name: str) -> str:
    """``auto`` becomes ``cuda`` where there is a GPU.

    Raises:
        UnknownName: not a backend.
        UsageError: ``cuda`` without a GPU.
    """
    if name not in BACKENDS:
        raise UnknownName("backend", name, BACKENDS)
    if name == "cpu":
        return name
    import torch

    if torch.cuda.is_available():
        return "cuda"
    if name == "cuda":
        raise UsageError("backend 'cuda': torch finds no CUDA device on this machine; use --backend cpu (no timing)")
    return "cpu"


@dataclass
class _Record:
    """What has been found so far; turned into an Outcome at the end."""

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
    timing: Any = None

    def cases(self) -> Cases | None:
        if not self.total:
            return None
        return Cases(self.passed, self.total, tuple(self.failures[:8]), self.telling_passed, self.telling)

    def end(self, verdict: Verdict, stage: Stage, message: str = "") -> Outcome:
        fault = None if verdict is Verdict.CORRECT else Fault.INFRA if verdict is Verdict.INFRA_FAULT else Fault.POLICY
        return Outcome(
            task=self.task.id, verdict=verdict, stage=stage, backend=self.backend, grading=self.grading, fault=fault,
            message=message, cases=self.cases(),
            violations=tuple(self.violations), compile=tuple(self.builds),
            timing=self.timing if verdict is Verdict.CORRECT else None, evidence=self.evidence,
            seconds={k: round(v, 4) for k, v in self.seconds.items()}, manifest=self.manifest, source_sha256=self.sha,
        )  # fmt: skip


class Grader:
    """Keeps a warm zygote between gradings. Use as a context manager, or ``close`` it."""

    def __init__(self, *, attempts: int = 2) -> None:
        self._zygote: Zygote | None = None
        self._attempts = attempts

    def __enter__(self) -> Grader:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """End the zygote."""
        if self._zygote is not None:
            self._zygote.close()
            self._zygote = None

    def zygote(self) -> Zygote:
        """The warm zygote, started on first use and again when it died."""
        if self._zygote is not None and not self._zygote.alive:
            self.close()
        if self._zygote is None:
            self._zygote = Zygote()
        return self._zygote

    def grade(
        self,
        task_id: str,
        source: str | bytes,
        *,
        backend: str = "auto",
        targets: Sequence[str] | None = None,
        grading: str = "contract",
        seed: int | None = None,
        timing: bool = True,
        split: str = "eval",
        wall: float = 30.0,
    ) -> Outcome:
        """Grade one source.

        Args:
            task_id: ``category/name``.
            source: the submission, text or raw bytes.
            backend: ``auto``, ``cpu`` or ``cuda``.
            targets: ahead-of-time targets, default all of ``TARGETS``; empty for none.
            grading: ``contract`` (ours) or ``paper`` (the paper's tolerances).
            seed: fixes the inputs; by default they are secret and fresh.
            timing: time correct kernels (CUDA only).
            split: ``eval`` adds the held-out shapes, ``train`` leaves them out.
            wall: seconds of wall time for the submission, over all stages but timing.

        Raises:
            UsageError: unknown task, backend, target, grading or split.
        """
        task = load_task(task_id)
        backend = resolve_backend(backend)
        if grading not in GRADINGS:
            raise UnknownName("grading", grading, GRADINGS)
        if split not in ("train", "eval"):
            raise UnknownName("split", split, ("train", "eval"))
        chosen = tuple(TARGETS if targets is None else targets)
        for t in chosen:
            if t not in TARGETS:
                raise UnknownName("target", t, TARGETS)
        data = source.encode("utf-8", "surrogatepass") if isinstance(source, str) else source
        secret = secrets.token_bytes(32) if seed is None else b"fixed:%d" % seed
        start = time.perf_counter()
        outcome: Outcome | None = None
        for attempt in range(1, self._attempts + 1):
            record = _Record(
                task, backend, grading, hashlib.sha256(data).hexdigest(), _manifest(task, backend, seed, split)
            )
            record.manifest["attempt"] = attempt
            try:
                outcome = _Grading(self, record, chosen, split, secret, timing, wall).run(data)
            except SandboxError as e:
                outcome = record.end(Verdict.INFRA_FAULT, Stage.COMPILE, str(e))
                self.close()
            if outcome.fault is not Fault.INFRA or outcome.message.startswith("unsupported"):
                break
        assert outcome is not None
        return replace(outcome, seconds={**outcome.seconds, "total": round(time.perf_counter() - start, 4)})


class _Grading:
    """The stages for one submission."""

    def __init__(
        self,
        grader: Grader,
        record: _Record,
        targets: Sequence[str],
        split: str,
        secret: bytes,
        timing: bool,
        wall: float,
    ) -> None:
        self.grader, self.record, self.targets = grader, record, list(targets)
        self.split, self.secret, self.timing, self.wall = split, secret, timing, wall
        self.task = record.task
        self.stage = Stage.SCREEN

    @contextlib.contextmanager
    def timed(self, stage: Stage) -> Iterator[None]:
        self.stage = stage
        start = time.perf_counter()
        try:
            yield
        finally:
            self.record.seconds[stage] = self.record.seconds.get(stage, 0.0) + time.perf_counter() - start

    def run(self, data: bytes) -> Outcome:
        with self.timed(Stage.SCREEN):
            screened = screen(self.task, data)
        if screened.verdict is not None:
            self.record.violations.extend(screened.violations)
            return self.record.end(screened.verdict, Stage.SCREEN, screened.message)
        self.stage = Stage.COMPILE
        with Talk(self.grader.zygote(), self.task, self.record.backend, self.secret, self.split, self.wall) as talk:
            try:
                return self._stages(talk, data)
            except Stopped as stop:
                self.record.violations.extend(stop.violations)
                if self.record.evidence is None:
                    self.record.evidence = self._evidence(talk, None)
                return self.record.end(stop.verdict, self.stage, stop.message)

    def _stages(self, talk: Talk, data: bytes) -> Outcome:
        from kbx_env.grading import judge as judges

        cases = [c for c in self.task.cases if self.split == "eval" or not c.held]
        proves = [_telling(self.task, self.task.cases.index(c)) for c in cases]
        self.record.total, self.record.telling = len(cases), sum(proves)
        with self.timed(Stage.COMPILE):
            talk.load(data)
            if talk.engine is None:
                # Which launches are there? A call with every launch left out tells, and is an ablation as well.
                first = next((i for i, c in enumerate(cases) if not c.out), 0)
                talk.call(cases[first], first, "ablate", quiet=True)
                self._build(talk)
        tally = Tally()
        with self.timed(Stage.CORRECT):
            for index, case in enumerate(cases):
                answers = talk.calls(case, index, judges.calls_needed(self.task, case), "run")
                ruling = self._judge(case, answers)
                if ruling.passed:
                    self.record.passed += 1
                    self.record.telling_passed += proves[index]
                else:
                    self.record.failures.append(CaseFailure(case.label(), ruling.reason))
                tally.add(case, answers, talk.ideal_bytes(case, answers[0]), proves[index])
        with self.timed(Stage.COMPILE):
            self._build(talk)
        self.record.evidence = self._evidence(talk, None, tally)
        with self.timed(Stage.EVIDENCE):
            self._provenance(talk, tally)
        if self.record.violations:
            return self.record.end(Verdict.REJECTED, Stage.EVIDENCE, self.record.violations[0].detail)
        if self.record.failures:
            worst = self.record.failures[0]
            return self.record.end(Verdict.INCORRECT, Stage.CORRECT, f"{worst.case}: {worst.reason}")
        with self.timed(Stage.EVIDENCE):
            ablation: list[bool] = []
            if talk.engine is None:
                # Three cases on which a result without launches cannot be right by accident.
                largest = sorted((i for i, p in enumerate(proves) if p), key=lambda i: -_size(cases[i]))[:3]
                for index, case in ((i, cases[i]) for i in largest):
                    answers = talk.calls(case, index, judges.calls_needed(self.task, case), "ablate")
                    ablation.append(self._judge(case, answers).passed)
                self.record.evidence = self._evidence(talk, not any(ablation) if ablation else None, tally)
            self._prove(talk, ablation, tally)
        if self.record.violations:
            return self.record.end(Verdict.REJECTED, Stage.EVIDENCE, self.record.violations[0].detail)
        failed = [b for b in self.record.builds if not b.ok and b.target == "sm_90" and b.shared is None]
        if failed and self.record.backend == "cpu":
            return self.record.end(
                Verdict.COMPILE_ERROR, Stage.COMPILE, f"{failed[0].kernel} for sm_90: {failed[0].error}"
            )
        if self.record.backend == "cuda" and self.timing:
            with self.timed(Stage.TIME):
                from kbx_env.grading import clock

                self.record.timing = clock.time_task(self.task, talk)
        stage = Stage.TIME if self.record.timing is not None else Stage.EVIDENCE
        return self.record.end(Verdict.CORRECT, stage)

    def _judge(self, case: Case, answers: Sequence[Claimed]) -> Any:
        from kbx_env.grading import judge as judges

        broken = next((a.broken for a in answers if a.broken), None)
        if broken:
            return judges.Ruling(False, broken)
        return judges.judge(
            self.task, case, answers[0].args, [a.answer for a in answers], grading=self.record.grading,
            device="cpu", generator_seeds=[a.generator_seed for a in answers],
        )  # fmt: skip

    def _build(self, talk: Talk) -> None:
        if self.targets:
            self.record.builds.extend(talk.build(self.targets))

    def _evidence(self, talk: Talk, ablation: bool | None, tally: Tally | None = None) -> Evidence:
        known = tally is not None and talk.engine is not None
        return Evidence(
            launches=talk.launches, ablation=ablation, denied_ops=tuple(sorted({d for _, d in talk.denied})),
            dots=tuple(sorted(talk.dots)), findings=tuple(talk.findings.values()),
            ideal_bytes=tally.ideal if tally else None,
            **(tally.facts() if known and tally else {}),
        )  # fmt: skip

    def _provenance(self, talk: Talk, tally: Tally) -> None:
        """A constant is no kernel's work, whatever it launched: it is not even wrong, it is empty."""
        if talk.engine is None or not tally.telling or not tally.launches:
            return
        if self.task.takes and not tally.inputs:
            found = "no value of any result depends on a value of any input"
            self.record.violations.append(Violation("constant", found))
        elif not self.task.takes and tally.frozen:
            found = "every call gave the same values, whatever the seed"
            self.record.violations.append(Violation("constant", found))

    def _prove(self, talk: Talk, ablation: Sequence[bool], tally: Tally) -> None:
        from kbx_env.truth import Contract

        found = self.record.violations
        found.extend(Violation(rule, detail) for rule, detail in dict.fromkeys(talk.denied))
        if not talk.standing:
            found.append(Violation("tampering", "the firewall no longer stands after the run"))
        if talk.launches == 0:
            found.append(Violation("no_launch", "no Triton kernel was launched"))
        if any(ablation):
            found.append(Violation("ablation", "the result is right even with every Triton launch left out"))
        if tally.unstored:
            detail = f"case {tally.unstored[0]}: no element of the result was stored by a Triton kernel"
            found.append(Violation("provenance", detail))
        truth = self.task.truth
        reached = talk.dots if talk.engine is None else tally.dots
        if isinstance(truth, Contract) and self.record.grading == "contract" and not set(truth.dots) & reached:
            wanted, got = " or ".join(truth.dots), ", ".join(sorted(talk.dots)) or "none"
            found.append(Violation(
                "contract", f"the scheme demands a matrix product {wanted} on the way to the result; launched: {got}"
            ))  # fmt: skip


@functools.cache
def _telling(task: Task, index: int) -> bool:
    """Whether no constant and no copy of an input would be right in a case; a property of the case, not of a draw."""
    from kbx_env.grading import inputs
    from kbx_env.grading import judge as judges

    case = task.cases[index]
    return not judges.is_trivial(task, case, inputs.draw(task, case, 2**32 + index))


def _size(case: Case) -> int:
    total = 1
    for v in case.axes.values():
        for n in v if isinstance(v, tuple) else (v,):
            total *= n
    return total


def _manifest(task: Task, backend: str, seed: int | None, split: str) -> dict[str, Any]:
    import torch
    import triton

    import kbx_env

    device = "cpu"
    if backend == "cuda":
        device = torch.cuda.get_device_name(0)
    return {
        "kbx_env": kbx_env.__version__, "python": platform.python_version(), "torch": torch.__version__,
        "triton": triton.__version__, "device": device, "machine": platform.machine(),
        "cores": os.cpu_count(), "task_fingerprint": task.fingerprint, "split": split,
        "seed_policy": "secret, fresh for every grading" if seed is None else f"fixed: {seed}",
    }  # fmt: skip


_shared: Grader | None = None


def grade(task_id: str, source: str | bytes, **options: Any) -> Outcome:
    """Grade one source with a warm grader shared by this process; see ``Grader.grade`` for the options."""
    global _shared
    if _shared is None:
        import atexit

        _shared = Grader()
        atexit.register(_shared.close)
    return _shared.grade(task_id, source, **options)
