"""What the stages of one grading share."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from kbx_env.grading import derived_cases, inputs, reference
from kbx_env.grading import judge as judges
from kbx_env.grading.ablations import DefenceLayer
from kbx_env.grading.evidence.accumulator import EvidenceAccumulator
from kbx_env.grading.record import OutcomeBuilder
from kbx_env.grading.runtime.processes import SandboxProcesses
from kbx_env.grading.runtime.session import ABANDONED, CallResult, RunnerSession, settings_of
from kbx_env.grading.runtime.untrusted import GradingAborted
from kbx_env.grading.speculative_compile import SpeculativeCompile
from kbx_env.grading.telling import is_telling
from kbx_env.grading.timing.gpu_lock import GpuHold
from kbx_env.options import GradeOptions
from kbx_env.outcome import Evidence, FaultKind, Outcome, Stage, Verdict, Violation
from kbx_env.spec.criteria import Close, Exact, QuantizationScheme
from kbx_env.spec.task import Case, Task

_FROM_CPU_TIER = (
    "findings", "kernels", "moved_bytes", "sector_bytes", "reread_bytes", "flops", "stored_share", "depends_on", "passing",
    "stages",
)  # fmt: skip
"""Fields of ``Evidence`` that only the CPU tier can fill in."""


REPEATED_CASES = 3
"""Largest number of cases of a grading that are called again on the same memory."""
REPEATED_SHARE = 1 / 12
"""Share of the elements of all cases that these cases have at most, so that gradings take hardly longer."""
SAMPLED_ELEMENTS = 1000
"""One of these cases has at least so many elements, if it can: who remembers results by samples of the values meets a change of
one element by chance in a small case. With three cases of any size, 1 in 60 gradings paid a memo with eight samples."""
VISIBLE = 1e-3
"""Relative difference of two results that every judge of fp32 results sees."""
LARGE_CHANCE = 1 / 8
"""Probability that one case of any size is called again as well, so that large cases are no safe place."""


@dataclass
class GradingContext:
    """One grading: its submission, its options, its processes, and what the stages have found so far.

    Attributes:
        task: the task.
        source: the submission.
        options: resolved options.
        secret: seeds the inputs.
        processes: the zygote and the pool of runners.
        without: layers of defence to leave out.
        builder: receives everything that goes into the outcome.
        stage: the stage that runs now.
        cpu_evidence: evidence of the same source on the CPU tier (CUDA only), ``None`` if there is none.
        proof: outcome of the same source on the CPU tier, if it was graded there before (CUDA only).
        cases: graded cases, after ``select_cases``.
        telling: for each of them, whether no constant and no copy of an input would be right.
        repeated: numbers of the cases that are called again on the same memory (CPU tier).
        accumulator: totals of the evidence of all calls.
        earlier_draws: random numbers that calls of earlier cases have drawn, for judges of randomness.
        gate: why the published gate refuses the source, in the paper's check; empty if it does not.
        drawn: by the number of a derived case, the arguments of its first call and what is known about them, until it is judged.
        speculative: the work of the compile stage, if it was done while the CPU tier proved the source (CUDA).
    """

    task: Task
    source: bytes
    options: GradeOptions
    secret: bytes
    processes: SandboxProcesses
    without: Collection[DefenceLayer]
    builder: OutcomeBuilder
    stage: Stage = Stage.SCREEN
    cpu_evidence: Evidence | None = None
    proof: Outcome | None = None
    cases: list[Case] = field(default_factory=list)
    telling: list[bool] = field(default_factory=list)
    repeated: frozenset[int] = frozenset()
    accumulator: EvidenceAccumulator = field(default_factory=EvidenceAccumulator)
    earlier_draws: list[Any] = field(default_factory=list)
    gate: str = ""
    drawn: dict[int, tuple[dict[str, Any], judges.Known]] = field(default_factory=dict)
    speculative: SpeculativeCompile | None = None
    _abandoned: Future[None] = field(default_factory=Future)
    _session: RunnerSession | None = None

    def select_cases(self) -> None:
        """Choose the declared cases of the split, and draw the derived ones."""
        self.cases = [c for c in self.task.cases if self.options.split == "eval" or not c.held]
        if self.as_published:
            self.telling = [True] * len(self.cases)
            self.builder.total = self.builder.telling = len(self.cases)
            return
        if self.lacks(DefenceLayer.CASES):
            self.cases = [c for c in self.cases if not c.out and is_telling(self.task, self.task.cases.index(c))][:1]
        self.telling = [is_telling(self.task, self.task.cases.index(c)) for c in self.cases]
        drawn = not self.lacks(DefenceLayer.CASES) and not self.lacks(DefenceLayer.DERIVED)
        if self.options.grading == "contract" and drawn:
            for case in derived_cases.derive(self.task, self.secret, self.options.split):
                index, known = len(self.cases), judges.Known()
                args = inputs.draw(self.task, case, inputs.case_seed(self.secret, self.task.id, self.options.split, index, 0))
                self.cases.append(case)
                self.telling.append(derived_cases.is_telling(self.task, case, args, known))
                self.drawn[index] = args, known
        self.builder.total, self.builder.telling = len(self.cases), sum(self.telling)
        if self.backend == "cpu" and not self.lacks(DefenceLayer.REPEAT):
            self.repeated = self._repeated()

    def _repeated(self) -> frozenset[int]:
        """Draw the telling cases that are called again: few and small ones, because each costs another call."""
        order = random.Random(inputs.case_seed(self.secret, self.task.id, "repeated", 0, 0))
        sizes = [c.elements() for c in self.cases]
        found = [i for i, telling in enumerate(self.telling) if telling]
        order.shuffle(found)
        # A call that fills the caller's ``out`` has to compute, so the others come first.
        found.sort(key=lambda i: self.cases[i].out)
        left, chosen = sum(sizes) * REPEATED_SHARE, list[int]()
        fitting = [i for i in found if sizes[i] <= left]
        largest = max(fitting, key=lambda i: (not self.cases[i].out, sizes[i]), default=None)
        first = next((i for i in fitting if sizes[i] >= SAMPLED_ELEMENTS), largest)
        for i in sorted(found, key=lambda i: i != first):
            if len(chosen) < REPEATED_CASES and sizes[i] <= left:
                chosen.append(i)
                left -= sizes[i]
        if found and order.random() < LARGE_CHANCE:
            chosen.append(order.choice(found))
        return frozenset(chosen or sorted(found, key=lambda i: sizes[i])[:1])

    # -- options -------------------------------------------------------------------------------

    @property
    def backend(self) -> str:
        """``cpu`` or ``cuda``."""
        return self.builder.backend

    @property
    def demands_work(self) -> bool:
        """Whether kernels must do the work: not in the paper's check, where torch may compute, or without that defence."""
        return not (self.as_published or self.session.torch_ops or self.lacks(DefenceLayer.PROVENANCE))

    @property
    def as_published(self) -> bool:
        """Whether the paper's check is made: no evidence that Triton did the work, no limits on torch and on host reads."""
        return self.options.grading == "paper"

    @property
    def allows_torch(self) -> bool:
        """Whether the wrapper may compute in torch."""
        return self.options.torch_ops == "allow" or self.as_published

    def lacks(self, layer: DefenceLayer) -> bool:
        """Whether a layer of defence is left out, to measure its worth."""
        return layer in self.without

    @property
    def proves_first(self) -> bool:
        """Whether the source has to be right on the CPU tier before the GPU is used."""
        return self.backend == "cuda" and not self.as_published and not self.lacks(DefenceLayer.PROOF)

    @property
    def scheme(self) -> QuantizationScheme | None:
        """The quantization scheme whose use the submission must prove; ``None`` for other tasks and gradings."""
        required = not self.lacks(DefenceLayer.CONTRACT)
        return self.task.truth if isinstance(self.task.truth, QuantizationScheme) and required else None

    # -- processes -----------------------------------------------------------------------------

    @property
    def session(self) -> RunnerSession:
        """The session with the runner, from the compile stage on."""
        assert self._session is not None
        return self._session

    def start_spare_runner(self) -> None:
        """Start a runner ahead of need (CUDA): it gets ready meanwhile."""
        if self.backend == "cuda":
            zygote = self.processes.zygote() if self._session is None else self._session.zygote
            self.processes.runner_pool.ahead(zygote, settings_of(self.backend, self.without, self.allows_torch, self.as_published))

    def open_session(self) -> RunnerSession:
        """Start the session with a runner.

        Returns:
            The session, which ``close`` ends.

        Raises:
            SandboxError: no process can be started.
            GradingAborted: the session was abandoned before.
        """
        zygote, slot = self.processes.zygote(), None
        if self.backend == "cuda":
            settings = settings_of(self.backend, self.without, self.allows_torch, self.as_published)
            slot = self.processes.runner_pool.take(zygote, settings, self._abandoned)
            if slot is None:  # a proof that fails must not wait for a runner to start
                raise GradingAborted(Verdict.RUNTIME_ERROR, ABANDONED)
        self._session = RunnerSession(
            zygote, self.task, self.backend, self.secret, self.options.split, self.options.wall, self.without,
            self.allows_torch, slot, self.as_published, self.processes.compilers,
        )  # fmt: skip
        self._session.drawn = {index: args for index, (args, _) in self.drawn.items()}
        self._session.gpu.add(self.builder.gpu)
        self.builder.gpu = self._session.gpu
        if self._abandoned.done():
            self._session.abandon()
        return self._session

    def abandon_session(self) -> None:
        """End the submission's process, if there is one, or else once it has started: its commands fail from now on."""
        if not self._abandoned.done():
            self._abandoned.set_result(None)
        session = self._session  # another thread may replace it
        if session is not None:
            session.abandon()

    def close(self) -> None:
        """End the session, if there is one, and start the runner of the next grading."""
        if self._session is not None:
            with self._session:
                self.start_spare_runner()

    def drop_session(self) -> None:
        """End the session and forget what it has built: another one is opened."""
        self.close()
        self._session = None
        self.builder.builds.clear()

    @property
    def gpu(self) -> GpuHold:
        """This grading's use of the GPU."""
        return self.builder.gpu or GpuHold(None)

    # -- facts ---------------------------------------------------------------------------------

    @contextlib.contextmanager
    def timed(self, stage: Stage) -> Iterator[None]:
        """Add the seconds of a block to a stage, without those in which it waited for the GPU."""
        self.stage = stage
        start, waited = time.perf_counter(), self.gpu.waited
        try:
            yield
        finally:
            took = time.perf_counter() - start - (self.gpu.waited - waited)
            self.builder.seconds[stage] = self.builder.seconds.get(stage, 0.0) + took

    @contextlib.contextmanager
    def aside(self, name: str) -> Iterator[None]:
        """Add the seconds of a block to an entry of their own beside the stages: ``cases``, ``start`` or ``end``."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.builder.seconds[name] = self.builder.seconds.get(name, 0.0) + time.perf_counter() - start

    def build(self) -> None:
        """Compile the kernels seen so far ahead of time, for the targets of the options."""
        if self.options.ahead_of_time:
            self.builder.builds.extend(self.session.build(list(self.options.ahead_of_time)))

    def judge(
        self, case: Case, calls: Sequence[CallResult], *, alone: bool = False, known: judges.Known | None = None
    ) -> judges.Ruling:  # fmt: skip
        """Judge the calls of a case.

        Args:
            case: the case.
            calls: on equal inputs.
            known: what is known about these inputs.
            alone: there is one call, also where the criterion compares several: judge what one call shows.

        Returns:
            The ruling.
        """
        if self.as_published:
            if calls[0].broken:
                return judges.Ruling(False, calls[0].broken)
            answers, seeds = [calls[0].answer], [calls[0].generator_seed]
            with self.gpu.using() if self.backend == "cuda" else contextlib.nullcontext():
                return judges.judge(self.task, case, calls[0].args, answers, device=self.backend, generator_seeds=seeds)
        checks_effects = not self.lacks(DefenceLayer.EFFECTS)
        broken = next((found for c in calls if (found := c.broken or (c.effect if checks_effects else None))), None)
        if broken:
            return judges.Ruling(False, broken)
        answers = [c.answer if checks_effects else _without_effects(self.task, case, c) for c in calls]
        answers *= judges.calls_needed(self.task, case) if alone else 1
        seeds = [c.generator_seed for c in calls]
        ruling = judges.judge(
            self.task, case, calls[0].args, answers, timed=alone, device="cpu",
            generator_seeds=seeds, earlier=None if alone else self.earlier_draws, known=known,
        )  # fmt: skip
        for k in range(max(len(c.reordered) for c in calls) if ruling.passed else 0):
            others = [(*c.reordered, *[c.answer] * (k + 1))[k] for c in calls] * (len(answers) // len(calls))
            again = judges.judge(
                self.task, case, calls[0].args, others, timed=alone, device="cpu", generator_seeds=seeds, known=known
            )
            if not again.passed:
                return replace(again, reason=f"with its programs in another order: {again.reason}")
        return ruling

    def tells(self, case: Case, call: CallResult, args: dict[str, Any]) -> bool:
        """Compare the results of an earlier call with the right ones for other arguments.

        A submission that remembers them then fails. The comparison is coarse, because a judge would measure the conditioning.

        Args:
            case: the case.
            call: the earlier call.
            args: the other arguments.

        Returns:
            Whether the earlier results are clearly wrong for them.
        """
        if not isinstance(self.task.truth, Close | Exact):
            return True
        expected, found = reference.expect(self.task, case, args, "cpu", exact=False).native, call.answer.outputs
        pairs = [(e, f) for e, f in zip(expected, found, strict=False) if e.shape == f.shape]
        same = [torch.isclose(e.to(f.dtype), f, rtol=VISIBLE, atol=0.0, equal_nan=True) for e, f in pairs]
        return not pairs or not all(bool(s.all()) for s in same)

    def evidence(self, ablation: bool | None, accumulator: EvidenceAccumulator | None) -> Evidence:
        """Return the evidence found so far.

        Args:
            ablation: whether results went wrong without launches, ``None`` if that was not tried.
            accumulator: totals over all calls; ``None`` if the grading ended before.

        Returns:
            The evidence. On CUDA the facts of the CPU tier take the place of those that a GPU cannot give.
        """
        session = self.session
        mine = Evidence(
            launches=session.launches, ablation=ablation, denied_ops=tuple(sorted({d for _, d in session.denied})),
            dots=tuple(sorted(session.dots)), findings=tuple(session.findings.values()),
            ideal_bytes=accumulator.ideal if accumulator else None,
            **(accumulator.facts() if accumulator is not None and session.engine is not None else {}),
        )  # fmt: skip
        if self.cpu_evidence is None:
            return mine
        return replace(mine, **{name: getattr(self.cpu_evidence, name) for name in _FROM_CPU_TIER})

    def aborted(self, reason: GradingAborted) -> Outcome:
        """Return the outcome of a grading that the submission, or an unsupported kernel, has ended early.

        A submission can call what the CPU tier does not support at will, so that this masks nothing that is already known: an
        attempt that was denied, or a case that failed.
        """
        if reason.fault_kind is FaultKind.UNSUPPORTED:
            reason = self._known_before(reason)
        if self.stage is Stage.TIME and reason.verdict is Verdict.INCORRECT:
            self.builder.failed_timed_case(reason.message)
        self.builder.violations.extend(reason.violations)
        if self.builder.evidence is None and self._session is not None:
            self.builder.evidence = self.evidence(None, None)
        return self.builder.end(reason.verdict, self.stage, reason.message, reason.fault_kind)

    def _known_before(self, reason: GradingAborted) -> GradingAborted:
        denied = self._session.denied if self._session is not None else []
        if denied:
            return GradingAborted(Verdict.REJECTED, denied[0][1], [Violation(*d) for d in denied[:5]])
        if self.builder.failures:
            worst = self.builder.failures[0]
            return GradingAborted(Verdict.INCORRECT, f"{worst.case}: {worst.reason}")
        return reason


def _without_effects(task: Task, case: Case, call: CallResult) -> judges.Answer:
    """Return the answer as if the call had changed no input and returned new tensors."""
    written = {*task.written(case.args), *(["out"] if case.out else [])}
    unchanged = {k: v for k, v in call.args.items() if isinstance(v, torch.Tensor) and k not in written}
    answer = call.answer
    return replace(
        answer, after={**answer.after, **unchanged}, aliases=tuple(n if n in written else None for n in answer.aliases),
        shares=tuple(n if n in written else None for n in answer.shares), strides=None,
    )  # fmt: skip
