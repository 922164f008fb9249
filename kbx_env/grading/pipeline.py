"""The stages of one grading, cheapest first; the first that fails ends it."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from kbx_env.grading.ablations import DefenceLayer
from kbx_env.grading.evidence import metamorphic, stage_credit
from kbx_env.grading.evidence.accumulator import EvidenceAccumulator
from kbx_env.grading.runtime.session import CallResult, RunnerSession, settings_of
from kbx_env.grading.runtime.untrusted import GradingAborted, survived
from kbx_env.grading.static.screen import screen
from kbx_env.grading.timing.gpu_lock import GpuHold
from kbx_env.outcome import (  # fmt: skip
    Build,
    CaseFailure,
    Cases,
    Estimate,
    Evidence,
    Fault,
    Outcome,
    Stage,
    Timing,
    Verdict,
    Violation,
)
from kbx_env.protocol import wire
from kbx_env.spec.criteria import QuantizationScheme, Sample
from kbx_env.spec.task import Case, Task

if TYPE_CHECKING:
    from kbx_env.grading.grader import Grader


@dataclass
class OutcomeBuilder:
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
    timing: Timing | None = None
    estimate: Estimate | None = None
    gpu: GpuHold | None = None
    slips: tuple[str, ...] | None = None

    def cases(self) -> Cases | None:
        """The cases so far, ``None`` before the first."""
        if not self.total:
            return None
        return Cases(self.passed, self.total, tuple(self.failures[:8]), self.telling_passed, self.telling)

    def end(self, verdict: Verdict, stage: Stage, message: str = "") -> Outcome:
        """The outcome, with everything found so far."""
        if self.gpu is not None and self.gpu.contended:
            self.seconds |= {"waited": self.gpu.waited} | self.gpu.spent
        fault = None if verdict is Verdict.CORRECT else Fault.INFRA if verdict is Verdict.INFRA_FAULT else Fault.POLICY
        return Outcome(
            task=self.task.id, verdict=verdict, stage=stage, backend=self.backend, grading=self.grading, fault=fault,
            message=wire.clean(message), cases=self.cases(),
            violations=tuple(self.violations), compile=tuple(self.builds),
            timing=self.timing if verdict is Verdict.CORRECT else None, evidence=self.evidence, estimate=self.estimate,
            seconds={k: round(v, 4) for k, v in self.seconds.items()}, manifest=self.manifest, source_sha256=self.sha,
            slips=self.slips,
        )  # fmt: skip


class GradingPipeline:
    """The stages for one submission."""

    def __init__(
        self,
        grader: Grader,
        record: OutcomeBuilder,
        targets: Sequence[str],
        split: str,
        secret: bytes,
        timing: bool,
        wall: float,
        estimate: str | None = None,
        torch_ops: str = "strict",
        compiled: bool = False,
        sizes: str = "published",
    ) -> None:
        self.device, self.torch_ops, self.compiled, self.sizes = estimate, torch_ops, compiled, sizes
        self.grader, self.record, self.targets = grader, record, list(targets)
        self.split, self.secret, self.timing, self.wall = split, secret, timing, wall
        self.task = record.task
        self.stage = Stage.SCREEN
        self.proof: Evidence | None = None
        self.gpu = GpuHold(None)
        self.drawn: list[Any] = []

    @contextlib.contextmanager
    def timed(self, stage: Stage) -> Iterator[None]:
        """Add the block's seconds to a stage; what it waited for the GPU counts apart."""
        self.stage = stage
        start, before = time.perf_counter(), self.gpu.waited
        try:
            yield
        finally:
            took = time.perf_counter() - start - (self.gpu.waited - before)
            self.record.seconds[stage] = self.record.seconds.get(stage, 0.0) + took

    def run(self, data: bytes) -> Outcome:
        """Grade."""
        with self.timed(Stage.SCREEN):
            screened = screen(self.task, data)
        self.record.slips = screened.slips
        if screened.verdict is not None and not (screened.violations and self.lacks(DefenceLayer.SCREEN)):
            self.record.violations.extend(screened.violations)
            return self.record.end(screened.verdict, Stage.SCREEN, screened.message)
        self.stage = Stage.COMPILE
        zygote, allow = self.grader.zygote(), self.torch_ops == "allow"
        places = self.grader.places if self.record.backend == "cuda" else None
        if places is not None:
            # It starts up while the CPU tier is at work, and waits for the next one when that finds the kernel wrong.
            settings = settings_of(self.record.backend, self.grader.without, allow)
            places.ahead(zygote, settings)
            if not self.lacks(DefenceLayer.PROOF):
                stopped = self._proof(data)
                if stopped is not None:
                    return stopped
        talk = RunnerSession(
            zygote, self.task, self.record.backend, self.secret, self.split, self.wall, self.grader.without, allow, places
        )  # fmt: skip
        self.gpu = self.record.gpu = talk.gpu
        with talk:
            try:
                outcome = self._stages(talk, data)
            except GradingAborted as stop:
                self.record.violations.extend(stop.violations)
                if self.record.evidence is None:
                    self.record.evidence = self._evidence(talk, None)
                return self.record.end(stop.verdict, self.stage, stop.message)
            finally:
                if places is not None:
                    places.ahead(zygote, settings)
        # Its process has ended: whatever it left running can neither slow down nor speed up a ratio that others are told too.
        return self._beside_compiled(outcome) if self.compiled else outcome

    def _beside_compiled(self, outcome: Outcome) -> Outcome:
        if outcome.timing is None:
            return outcome
        from kbx_env.grading.timing import compiled

        torch.cuda.empty_cache()  # another process needs it now
        start = time.perf_counter()
        timing = compiled.beside(self.task, outcome.timing, self.gpu, sizes=self.sizes)
        return replace(outcome, timing=timing, seconds={**outcome.seconds, "compiled": round(time.perf_counter() - start, 4)})

    def _proof(self, data: bytes) -> Outcome | None:
        """What a GPU cannot show, shown on the CPU tier first: the same source, with launches executed by the grader.

        Returns what ended the grading there; ``None`` to go on. What the CPU tier cannot execute goes on without proof.
        """
        start = time.perf_counter()
        record = OutcomeBuilder(self.task, "cpu", self.record.grading, self.record.sha, self.record.manifest)
        shown = GradingPipeline(
            self.grader, record, (), self.split, self.secret + b"cpu", False, self.wall, torch_ops=self.torch_ops
        ).run(data)
        self.record.seconds["proof"] = time.perf_counter() - start
        self.proof = shown.evidence if shown.correct else None
        if shown.correct or shown.verdict is Verdict.INFRA_FAULT:
            return None
        seconds = {**self.record.seconds, **shown.seconds}
        return replace(shown, backend="cuda", message=f"executed on the CPU tier: {shown.message}", seconds=seconds)

    def _stages(self, talk: RunnerSession, data: bytes) -> Outcome:
        from kbx_env.grading import judge as judges

        cases = [c for c in self.task.cases if self.split == "eval" or not c.held]
        if self.lacks(DefenceLayer.CASES):
            cases = [c for c in cases if not c.out and _telling(self.task, self.task.cases.index(c))][:1]
        proves = [_telling(self.task, self.task.cases.index(c)) for c in cases]
        self.record.total, self.record.telling = len(cases), sum(proves)
        with self.timed(Stage.COMPILE):
            talk.load(data)
            if talk.engine is None:
                # Which launches are there? A call with every launch left out tells, and is an ablation as well.
                first = next((i for i, c in enumerate(cases) if not c.out), 0)
                with survived():
                    talk.call(cases[first], first, "ablate", quiet=True)
                self._build(talk)
        tally = EvidenceAccumulator()
        asked = talk.engine is not None and self._contract() is not None
        if talk.engine is not None:
            talk.engine.keep = asked
        with self.timed(Stage.CORRECT):
            needed = [judges.calls_needed(self.task, c) for c in cases]
            made = talk.at_once(cases, needed) if talk.engine is None else []
            for index, case in enumerate(cases):
                answers = made[index] if made else talk.calls(case, index, needed[index], "run")
                if isinstance(answers, Exception):
                    raise answers
                ruling = self._judge(case, answers)
                if ruling.passed:
                    self.record.passed += 1
                    self.record.telling_passed += proves[index]
                else:
                    self.record.failures.append(CaseFailure(case.label(), ruling.reason + _unwritten(answers[0])))
                if ruling.passed and proves[index] and asked:
                    tally.schemeless = tally.schemeless or metamorphic.flaw(self.task, case, answers[0], talk, index)
                if not ruling.passed and proves[index] and asked and len(tally.stages) < stage_credit.LOOKS:
                    seen = stage_credit.stages(self.task, case, answers[0], talk, index)
                    tally.stages += [seen] if seen else []
                tally.add(case, answers, talk.ideal_bytes(case, answers[0]), proves[index], ruling)
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
            if (talk.engine is None or talk.torch_ops) and not self.lacks(DefenceLayer.ABLATION):
                # Three cases on which a result without launches cannot be right by accident.
                largest = sorted((i for i, p in enumerate(proves) if p), key=lambda i: -_size(cases[i]))[:3]
                for index, case in ((i, cases[i]) for i in largest):
                    ablation.append(False)
                    with survived():
                        answers = talk.calls(case, index, judges.calls_needed(self.task, case), "ablate")
                        ablation[-1] = self._judge(case, answers).passed
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
                from kbx_env.grading.timing import paired

                self.record.timing = paired.time_task(self.task, talk, self.sizes)
        if self.record.backend == "cpu" and self.device is not None:
            from kbx_env.grading.timing import estimate as guess

            start = time.perf_counter()
            self.record.estimate = guess.estimate(self.task, talk, self.device, self.sizes)
            self.record.seconds["estimate"] = time.perf_counter() - start
        stage = Stage.TIME if self.record.timing is not None else Stage.EVIDENCE
        return self.record.end(Verdict.CORRECT, stage)

    def _judge(self, case: Case, answers: Sequence[CallResult]) -> Any:
        from kbx_env.grading import judge as judges

        looked = not self.lacks(DefenceLayer.EFFECTS)
        broken = next((found for a in answers if (found := a.broken or (a.effect if looked else None))), None)
        if broken:
            return judges.Ruling(False, broken)
        given = [a.answer for a in answers]
        if not looked:
            given = [_innocent(self.task, case, a) for a in answers]
        return judges.judge(
            self.task, case, answers[0].args, given, grading=self.record.grading,
            device="cpu", generator_seeds=[a.generator_seed for a in answers], earlier=self.drawn,
        )  # fmt: skip

    def lacks(self, layer: DefenceLayer) -> bool:
        """Whether a layer is left out, to see what it is worth."""
        return layer in self.grader.without

    def _contract(self) -> QuantizationScheme | None:
        """The quantization scheme of which evidence is asked."""
        truth, asked = self.task.truth, self.record.grading == "contract" and not self.lacks(DefenceLayer.CONTRACT)
        return truth if isinstance(truth, QuantizationScheme) and asked else None

    def _build(self, talk: RunnerSession) -> None:
        if self.targets:
            self.record.builds.extend(talk.build(self.targets))

    def _evidence(self, talk: RunnerSession, ablation: bool | None, tally: EvidenceAccumulator | None = None) -> Evidence:
        known = tally is not None and talk.engine is not None
        mine = Evidence(
            launches=talk.launches, ablation=ablation, denied_ops=tuple(sorted({d for _, d in talk.denied})),
            dots=tuple(sorted(talk.dots)), findings=tuple(talk.findings.values()),
            ideal_bytes=tally.ideal if tally else None,
            **(tally.facts() if known and tally else {}),
        )  # fmt: skip
        if self.proof is None:
            return mine
        shown = ("findings", "kernels", "moved_bytes", "sector_bytes", "reread_bytes", "flops", "stored_share", "depends_on",
                 "passing", "stages")  # fmt: skip
        return replace(mine, **{name: getattr(self.proof, name) for name in shown})

    def _provenance(self, talk: RunnerSession, tally: EvidenceAccumulator) -> None:
        """A constant is no kernel's work, whatever it launched: it is not even wrong, it is empty."""
        if talk.engine is None or not tally.telling or not tally.launches or self.lacks(DefenceLayer.CONSTANT):
            return
        if self.task.takes and not tally.inputs:
            found = "no value of any result depends on a value of any input"
            self.record.violations.append(Violation("constant", found))
        elif not self.task.takes and (tally.frozen if isinstance(self.task.truth, Sample) else tally.flat):
            found = "every call gave one and the same number everywhere, whatever it was asked for"
            self.record.violations.append(Violation("constant", found))

    def _prove(self, talk: RunnerSession, ablation: Sequence[bool], tally: EvidenceAccumulator) -> None:
        found = self.record.violations
        found.extend(Violation(rule, detail) for rule, detail in dict.fromkeys(talk.denied))
        if (
            not talk.standing
            and not talk.torch_ops
            and not self.lacks(DefenceLayer.REPROBE)
            and not self.lacks(DefenceLayer.FIREWALL)
        ):
            found.append(Violation("tampering", "the firewall no longer stands after the run"))
        if talk.launches == 0 and not self.lacks(DefenceLayer.PROVENANCE):
            found.append(Violation("no_launch", "no Triton kernel was launched"))
        if any(ablation):
            found.append(Violation("ablation", "the result is right even with every Triton launch left out"))
        if tally.unstored and not talk.torch_ops and not self.lacks(DefenceLayer.PROVENANCE):
            detail = f"case {tally.unstored[0]}: no element of a result was stored by a Triton kernel"
            found.append(Violation("provenance", detail))
        if tally.by_host and not talk.torch_ops and not self.lacks(DefenceLayer.PROVENANCE):
            detail = (
                f"case {tally.by_host[0]} of the result were put there by torch or the host, not by a Triton kernel"
            )
            found.append(Violation("provenance", detail))
        truth = self._contract()
        reached = talk.dots if talk.engine is None else tally.dots
        # On a GPU the kinds are claims; where the CPU tier has executed the same source, it has also looked at them.
        known = talk.engine is not None or self.proof is None
        if tally.schemeless:
            found.append(Violation("contract", tally.schemeless))
        if truth is not None and known and not set(truth.dots) & reached:
            wanted, got = " or ".join(truth.dots), ", ".join(sorted(talk.dots)) or "none"
            found.append(Violation(
                "contract", f"the scheme demands {wanted} on the way to the result; launched products: {got}"
            ))  # fmt: skip


def _innocent(task: Task, case: Case, call: CallResult) -> Any:
    """The answer as if the call had left its inputs alone and returned new tensors."""
    held = {*task.written(case.args), *(["out"] if case.out else [])}
    same = {k: v for k, v in call.args.items() if isinstance(v, torch.Tensor) and k not in held}
    a = call.answer
    return replace(
        a, after={**a.after, **same}, aliases=tuple(n if n in held else None for n in a.aliases),
        shares=tuple(n if n in held else None for n in a.shares), strides=None,
    )  # fmt: skip


def _unwritten(call: CallResult) -> str:
    """What a GPU would not tell: elements of the result that nothing wrote."""
    total, missing = sum(o.elements for o in call.origins), sum(o.unwritten for o in call.origins)
    return f"; {100 * missing / total:.3g} % of the elements were never written" if missing else ""


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
