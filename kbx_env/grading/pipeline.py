"""One grading: the stages in order, cheapest first. The first stage that fails ends it.

    source -> Screen -> ProveOnCpu (CUDA) -> Compile -> Correct -> ProveWork -> Builds -> Time (CUDA) -> EstimateTime -> Outcome
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import replace
from functools import partial

from kbx_env.grading.context import GradingContext
from kbx_env.grading.judge import randomness
from kbx_env.grading.record import OutcomeBuilder
from kbx_env.grading.runtime.untrusted import GradingAborted
from kbx_env.grading.speculative_compile import SpeculativeCompile, cores_are_idle
from kbx_env.grading.stages import (
    Builds,
    Compile,
    Correct,
    EstimateTime,
    GradingStage,
    ProveWork,
    Screen,
    Time,
    beside_compiled,
)
from kbx_env.grading.threads import single_threaded
from kbx_env.outcome import Outcome, Stage, Verdict


class ProveOnCpu:
    """CUDA only: grades the source on the CPU backend first, to obtain provenance evidence that a GPU cannot give.

    The CPU tier executes the launches itself, with other secret inputs. A failing outcome there ends the grading. A kernel
    that the CPU tier cannot execute goes on without that evidence. The paper's check asks for no evidence. A proof that was
    made before, by a worker of a ``TieredPool``, is not made again. Where cores are idle, the kernels are compiled for the GPU
    meanwhile.
    """

    def run(self, context: GradingContext) -> Outcome | None:
        """See ``GradingStage.run``."""
        if context.backend != "cuda":
            return None
        context.stage = Stage.COMPILE
        context.start_spare_runner()  # it gets ready during this stage, and serves the next grading if the kernel is wrong
        if not context.proves_first:
            return None
        start, builder = time.perf_counter(), context.builder
        proof = context.proof
        if proof is None:
            proof = self._prove(context)
        else:
            builder.seconds["proof"] = time.perf_counter() - start
        context.cpu_evidence = proof.evidence if proof.correct else None
        if goes_on(proof):
            return None
        seconds = {**builder.seconds, **proof.seconds}
        return replace(proof, backend="cuda", message=f"executed on the CPU tier: {proof.message}", seconds=seconds)

    @staticmethod
    def _prove(context: GradingContext) -> Outcome:
        """Grade the source on the CPU tier; begin to compile for the GPU beside that, if cores are idle."""
        start, waited, builder = time.perf_counter(), None, context.builder
        with single_threaded():
            work = partial(Compile.compile, context)
            speculative = SpeculativeCompile(builder, work, context.abandon_session) if cores_are_idle() else None
            try:
                proof = run_pipeline(on_cpu_tier(context))
                took = time.perf_counter() - start
                if speculative is not None and goes_on(proof):
                    waited = speculative.await_end()
                    context.speculative = speculative
            finally:
                if speculative is not None and context.speculative is None:
                    speculative.abandon()
        builder.seconds |= {"proof": took} | ({} if waited is None else {Stage.COMPILE: waited})
        return proof


def goes_on(proof: Outcome) -> bool:
    """Return whether a grading goes on after this proof: the kernel is right, or the CPU tier cannot execute it."""
    return proof.correct or proof.verdict is Verdict.INFRA_FAULT


STAGES: tuple[GradingStage, ...] = (
    Screen(), ProveOnCpu(), Compile(), Correct(), ProveWork(), Builds(), Time(), EstimateTime(),
)  # fmt: skip


def run_pipeline(context: GradingContext) -> Outcome:
    """Grade one submission.

    Args:
        context: of this grading; its session is closed at the end.

    Returns:
        The outcome.

    Raises:
        SandboxError: the machine is to blame.
    """
    with contextlib.ExitStack() as closing:
        closing.callback(context.close)
        closing.enter_context(randomness.seeded_by(context.secret))
        outcome = _first_failure(context) or _correct(context)
        ended = time.perf_counter()
    outcome = replace(outcome, seconds={**outcome.seconds, "end": round(time.perf_counter() - ended, 4)})
    return beside_compiled(context, outcome)


def _first_failure(context: GradingContext) -> Outcome | None:
    try:
        for stage in STAGES:
            if outcome := stage.run(context):
                return outcome
    except GradingAborted as reason:
        return context.aborted(reason)
    return None


def _correct(context: GradingContext) -> Outcome:
    return context.builder.end(Verdict.CORRECT, Stage.TIME if context.builder.timing is not None else Stage.EVIDENCE)


def on_cpu_tier(context: GradingContext) -> GradingContext:
    """Return the context of grading the same source on the CPU backend, with other secret inputs, without builds and timing."""
    builder = context.builder
    return GradingContext(
        context.task, context.source,
        replace(context.options, backend="cpu", targets=(), timing=False, estimate=None, compiled=False, sizes="published"),
        context.secret + b"cpu", context.processes, context.without,
        OutcomeBuilder(context.task, "cpu", builder.grading, builder.sha, builder.manifest),
    )  # fmt: skip
