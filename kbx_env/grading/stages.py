"""The stages of a grading. Each returns the outcome that ends the grading, or ``None`` to go on."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch

from kbx_env.deadlines import COMPILE_SECONDS
from kbx_env.device.driver import give_back
from kbx_env.grading import judge as judges
from kbx_env.grading.ablations import DefenceLayer
from kbx_env.grading.context import GradingContext
from kbx_env.grading.evidence import metamorphic, stage_credit
from kbx_env.grading.judge import paper
from kbx_env.grading.runtime.session import CallResult
from kbx_env.grading.runtime.untrusted import GradingAborted, survived
from kbx_env.grading.static.screen import screen
from kbx_env.outcome import CaseFailure, Outcome, Stage, Verdict, Violation
from kbx_env.spec.criteria import Sample
from kbx_env.spec.task import Case

AGAIN = 2
"""Calls on the same memory with other values, of each case that is chosen for it (CPU tier)."""
CHANGES = 4
"""Draws of other values at most for which the last result is still right, as a value below the largest is for a maximum."""
ABLATED_CASES = 3
"""Telling cases that are called again without launches (CUDA)."""


_SUBCLASSES = {"RuntimeError": ("_LinAlgError", "LinAlgError", "NotImplementedError", "OutOfMemoryError")}
"""Exceptions of torch that a handler of the key catches as well."""


class GradingStage(Protocol):
    """One step of a grading."""

    def run(self, context: GradingContext) -> Outcome | None:
        """Do the step.

        Args:
            context: of this grading; receives what is found.

        Returns:
            The outcome that ends the grading, ``None`` to go on.

        Raises:
            GradingAborted: the submission ended the grading.
            SandboxError: the machine is to blame.
        """


class Screen:
    """Reads the text: forbidden imports and names, the entry function and its parameters. Runs nothing."""

    def run(self, context: GradingContext) -> Outcome | None:
        """See ``GradingStage.run``."""
        with context.timed(Stage.SCREEN):
            screened = screen(context.task, context.source, as_published=context.as_published)
        builder = context.builder
        builder.slips, context.gate = screened.slips, screened.gate
        if screened.verdict is None or (screened.text and context.lacks(DefenceLayer.SCREEN)):
            return None
        builder.violations.extend(screened.violations)
        return builder.end(screened.verdict, Stage.SCREEN, screened.message)


class Compile:
    """Starts the runner and executes the module there. On CUDA the launches of all calls are compiled, and nothing is launched."""

    def run(self, context: GradingContext) -> Outcome | None:
        """See ``GradingStage.run``."""
        context.stage = Stage.COMPILE
        if context.speculative is not None:  # done while the CPU tier proved the source
            context.speculative.finish()
        else:
            self.compile(context)
        return None

    @staticmethod
    def compile(context: GradingContext) -> None:
        """Do the stage's work; arguments and errors as for ``run``."""
        Compile._load(context)
        if context.session.engine is not None:
            return
        # Without a proof most kernels are wrong, and nothing of them will be timed.
        if context.options.timed and context.proves_first:
            with context.timed(Stage.COMPILE):
                if context.session.compile_all(lambda: _begin_all(context), COMPILE_SECONDS):
                    return
            # Checked calls come first then, in a process that has seen no timed ones.
            context.drop_session()
            Compile._load(context)
        with context.timed(Stage.COMPILE):
            context.session.begin_calls(context.cases, needed_calls(context))

    @staticmethod
    def _load(context: GradingContext) -> None:
        """Open a session and load the submission there."""
        if not context.cases:
            with context.aside("cases"):
                context.processes.start()  # a cold zygote gets warm meanwhile
                context.select_cases()
        with context.aside("start"):
            session = context.open_session()
        with context.timed(Stage.COMPILE):
            session.load(context.source)
            if session.engine is None:
                # A call with every launch left out shows which launches there are.
                first = next((i for i, c in enumerate(context.cases) if not c.out), 0)
                with survived():
                    session.call(context.cases[first], first, "ablate", quiet=True)
                context.build()


def _begin_all(context: GradingContext) -> None:
    """Begin to compile what timed and checked calls launch. Kernels of timed cases take the longest, so they come first."""
    from kbx_env.grading.timing import task_timing

    task_timing.begin_compiling(context.task, context.session, context.options.sizes)
    context.session.begin_calls(context.cases, needed_calls(context))


def needed_calls(context: GradingContext) -> list[int]:
    """Return how many calls the judge needs of each case."""
    return [judges.calls_needed(context.task, c) for c in context.cases]


class Correct:
    """Calls the entry on every case and judges the results. Gathers evidence of each call."""

    def run(self, context: GradingContext) -> Outcome | None:
        """See ``GradingStage.run``."""
        session = context.session
        if session.engine is not None:
            session.engine.keep = not context.as_published
        context.accumulator.takes_inputs = bool(context.task.takes)
        with context.timed(Stage.CORRECT):
            needed = needed_calls(context)
            made = session.at_once(context.cases, needed) if session.engine is None else []
            for index, case in enumerate(context.cases):
                context.builder.stopped_at, context.builder.stopped_in = index + 1, case.label()
                if index in context.repeated:
                    self._judge_repeated(context, index, needed[index])
                    continue
                try:
                    calls = made[index] if made else self._call(context, index, needed[index])
                    if isinstance(calls, Exception):
                        raise calls
                except GradingAborted as e:
                    if e.error is None or e.error[0] not in raising(case):
                        raise
                    self._judge_error(context, index, *e.error)
                    continue
                self._judge(context, index, calls)
            context.builder.stopped_at, context.builder.stopped_in = None, ""
        with context.timed(Stage.COMPILE):
            context.build()
        context.builder.evidence = context.evidence(None, context.accumulator)
        return None

    @staticmethod
    def _judge_error(context: GradingContext, index: int, name: str, text: str) -> None:
        """Judge an exception that the published test catches."""
        builder, case = context.builder, context.cases[index]
        ruling = paper.raised(context.task, case, context.session.arguments(case, index), name, text)
        builder.passed += ruling.passed
        builder.telling_passed += ruling.passed
        if not ruling.passed:
            builder.failures.append(CaseFailure(case.label(), ruling.reason))

    @staticmethod
    def _call(context: GradingContext, index: int, needed: int) -> list[CallResult]:
        try:
            return context.session.calls(context.cases[index], index, needed, "run")
        except GradingAborted:
            if strided := layouts(context.session.sent):
                context.builder.stopped_in += f" [{strided}]"
            raise

    def _judge_repeated(self, context: GradingContext, index: int, needed: int) -> None:
        """Judge a case that is called again on the same memory with other values.

        Where a criterion needs several calls on equal values, that call comes between them, so that what the submission
        remembers of the last call is of no use.
        """
        case, session, builder = context.cases[index], context.session, context.builder
        calls = [session.call(case, index, "run", keep=True)]
        counts = False
        if needed == 1:  # the metamorphic check executes the engine's last call again
            counts = self._judge(context, index, calls)
        again, last = list[CallResult](), calls[0]
        for turn in range(AGAIN):
            last = session.call_again(case, self._telling_change(context, index, last, turn))
            again.append(last)
        if needed > 1:
            counts = self._judge(context, index, calls + [session.call(case, index, "run", k) for k in range(1, needed)])
        for call in again:
            ruling = context.judge(case, [call], alone=True)
            # Only one failure of a case is told: the first call may have been wrong, too.
            if not ruling.passed and (not builder.failures or builder.failures[-1].case != case.label()):
                reason = f"called again on the same tensors with other values: {ruling.reason}"
                builder.passed, builder.telling_passed = builder.passed - 1, builder.telling_passed - counts
                builder.failures.append(CaseFailure(case.label(), reason))
                counts = False
        if not context.accumulator.prove(case, again, context.telling[index]) and context.demands_work:
            builder.telling_passed -= counts

    @staticmethod
    def _telling_change(context: GradingContext, index: int, last: CallResult, turn: int) -> dict[str, Any]:
        """Draw arguments for the next call on the same memory, for which the last call's result is wrong.

        All turns but the last change a single element, if that tells: samples of the values hardly meet it.

        Args:
            context: of this grading.
            index: number of the case.
            last: the last call.
            turn: number of the repetition.

        Returns:
            The arguments.
        """
        case, few = context.cases[index], int(turn < AGAIN - 1)
        args = last.args
        for attempt in range(CHANGES):
            args = context.session.redrawn(case, index, last, turn * CHANGES + attempt, few << max(0, attempt - 1))
            if context.tells(case, last, args):
                break
        return args

    def _judge(self, context: GradingContext, index: int, calls: Sequence[CallResult]) -> bool:
        """Judge a case and add its evidence.

        A telling case that passes counts for partial credit only if kernels did its work: a submission whose results torch or
        the host computed must not earn it by failing another case on purpose, or by ending early.

        Returns:
            Whether the case counts as a telling one that passed.
        """
        case, telling, builder = context.cases[index], context.telling[index], context.builder
        ruling = context.judge(case, calls, known=context.drawn.pop(index, (None, None))[1])
        if ruling.passed:
            builder.passed += 1
        else:
            note = "" if context.as_published else _unwritten(calls[0])  # not watched there
            builder.failures.append(CaseFailure(case.label(), ruling.reason + note, layouts(calls[0].args)))
        accumulator, session = context.accumulator, context.session
        if telling and session.engine is not None and context.scheme is not None:
            if ruling.passed:
                accumulator.schemeless = accumulator.schemeless or metamorphic.flaw(context.task, case, calls[0], session, index)
            elif len(accumulator.stages) < stage_credit.LOOKS:
                seen = stage_credit.stages(context.task, case, calls[0], session, index)
                accumulator.stages += [seen] if seen else []
        ideal = 0 if context.as_published else session.ideal_bytes(case, calls[0])
        worked = accumulator.add(case, calls, ideal, telling, ruling)
        counts = ruling.passed and telling and (worked or not context.demands_work)
        builder.telling_passed += counts
        return counts


class ProveWork:
    """Rejects a submission whose results Triton did not compute, and ends the grading of one with wrong results."""

    def run(self, context: GradingContext) -> Outcome | None:
        """See ``GradingStage.run``."""
        builder = context.builder
        with context.timed(Stage.EVIDENCE):
            builder.violations.extend(tampering(context) if context.as_published else constant_result(context))
        if rejected := self._rejected(context):
            return rejected
        if builder.failures:
            worst = builder.failures[0]
            return builder.end(Verdict.INCORRECT, Stage.CORRECT, f"{worst.case}: {worst.reason}")
        if context.as_published:
            return builder.end(Verdict.INCORRECT, Stage.CORRECT, context.gate) if context.gate else None
        with context.timed(Stage.EVIDENCE):
            right_without_launches = self._ablate(context)
            builder.violations.extend(missing_evidence(context, right_without_launches))
        return self._rejected(context)

    @staticmethod
    def _rejected(context: GradingContext) -> Outcome | None:
        violations = context.builder.violations
        return context.builder.end(Verdict.REJECTED, Stage.EVIDENCE, violations[0].detail) if violations else None

    def _ablate(self, context: GradingContext) -> list[bool]:
        """Call the largest telling cases without launches; returns for each whether the result was right all the same."""
        session = context.session
        if (session.engine is not None and not session.torch_ops) or context.lacks(DefenceLayer.ABLATION):
            return []
        right: list[bool] = []
        telling = [i for i, t in enumerate(context.telling) if t]
        for index in sorted(telling, key=lambda i: -context.cases[i].elements())[:ABLATED_CASES]:
            case = context.cases[index]
            right.append(False)
            with survived():
                calls = session.calls(case, index, judges.calls_needed(context.task, case), "ablate")
                right[-1] = context.judge(case, calls).passed
        context.builder.evidence = context.evidence(not any(right) if right else None, context.accumulator)
        return right


def tampering(context: GradingContext) -> list[Violation]:
    """List denied operations: what is left of the evidence in the paper's check, which pays no attack on the grader either.

    Args:
        context: of this grading.

    Returns:
        The violations, in the order in which they happened.
    """
    return [Violation(rule, detail) for rule, detail in dict.fromkeys(context.session.denied)]


def raising(case: Case) -> tuple[str, ...]:
    """Return the names of exceptions that the published test of a case catches; none for other cases."""
    return (case.raises, *_SUBCLASSES.get(case.raises, ())) if case.raises else ()


def constant_result(context: GradingContext) -> list[Violation]:
    """Find results that depend on no input (CPU tier): such a result is no kernel's work, whatever it launched.

    Args:
        context: of this grading.

    Returns:
        At most one violation.
    """
    totals, task = context.accumulator, context.task
    unknown = context.session.engine is None or not totals.telling or not totals.launches
    if unknown or context.lacks(DefenceLayer.CONSTANT):
        return []
    if task.takes:
        found = "" if totals.inputs else "no value of any result depends on a value of any input"
        if not found and totals.detached:
            found = f"case {totals.detached[0]}: in one call no value of any result depends on a value of an input of that call"
    else:
        constant = totals.frozen if isinstance(task.truth, Sample) else totals.flat
        found = "every call gave one and the same number everywhere, whatever it was asked for" if constant else ""
    return [Violation("constant", found)] if found else []


def missing_evidence(context: GradingContext, right_without_launches: Sequence[bool]) -> list[Violation]:
    """List what shows that Triton did not do the work.

    Args:
        context: of this grading.
        right_without_launches: for each ablated case, whether its result was right.

    Returns:
        The violations, in the order of their weight.
    """
    session, totals = context.session, context.accumulator
    found = [Violation(rule, detail) for rule, detail in dict.fromkeys(session.denied)]
    checks_firewall = not context.lacks(DefenceLayer.REPROBE) and not context.lacks(DefenceLayer.FIREWALL)
    if not session.standing and not session.torch_ops and checks_firewall:
        found.append(Violation("tampering", "the firewall no longer stands after the run"))
    if session.launches == 0 and not context.lacks(DefenceLayer.PROVENANCE):
        found.append(Violation("no_launch", "no Triton kernel was launched"))
    elif totals.launchless and not session.torch_ops and not context.lacks(DefenceLayer.PROVENANCE):
        found.append(Violation("no_launch", f"case {totals.launchless[0]}: one of its calls launched no Triton kernel"))
    if any(right_without_launches):
        found.append(Violation("ablation", "the result is right even with every Triton launch left out"))
    if not session.torch_ops and not context.lacks(DefenceLayer.PROVENANCE):
        if totals.unstored:
            detail = f"case {totals.unstored[0]}: no element of a result was stored by a Triton kernel"
            found.append(Violation("provenance", detail))
        if totals.by_host:
            detail = f"case {totals.by_host[0]} of the result were put there by torch or the host, not by a Triton kernel"
            found.append(Violation("provenance", detail))
        if totals.assembled:
            detail = f"case {totals.assembled[0]}: torch's copies put the whole result together, and a kernel only copied it"
            found.append(Violation("provenance", detail))
    return found + _missing_scheme(context)


def _missing_scheme(context: GradingContext) -> list[Violation]:
    session, totals, scheme = context.session, context.accumulator, context.scheme
    found = [Violation("contract", totals.schemeless)] if totals.schemeless else []
    # On a GPU the kinds of products are claims; if the CPU tier has executed the same source, it has checked them.
    known = session.engine is not None or context.cpu_evidence is None
    reached = session.dots if session.engine is None else totals.dots
    if scheme is not None and known and not set(scheme.dots) & reached:
        wanted, got = " or ".join(scheme.dots), ", ".join(sorted(session.dots)) or "none"
        detail = f"the scheme demands {wanted} on the way to the result; launched products: {got}"
        found.append(Violation("contract", detail))
    return found


class Builds:
    """Ends the grading of a kernel that does not compile for sm_90 (CPU backend)."""

    def run(self, context: GradingContext) -> Outcome | None:
        """See ``GradingStage.run``."""
        failed = [b for b in context.builder.builds if not b.ok and b.target == "sm_90" and b.shared is None]
        if not failed or context.backend != "cpu":
            return None
        message = f"{failed[0].kernel} for sm_90: {failed[0].error}"
        return context.builder.end(Verdict.COMPILE_ERROR, Stage.COMPILE, message)


class Time:
    """Times the kernel against torch eager (CUDA)."""

    def run(self, context: GradingContext) -> Outcome | None:
        """See ``GradingStage.run``."""
        if not context.options.timed:
            return None
        with context.timed(Stage.TIME):
            from kbx_env.grading.timing import task_timing

            context.builder.timing = task_timing.time_task(
                context.task, context.session, context.options.sizes, context.options.precision
            )  # fmt: skip
        if denied := context.session.denied:  # in a timed call, after the work was proved
            context.builder.violations.extend(Violation(rule, detail) for rule, detail in dict.fromkeys(denied))
            return context.builder.end(Verdict.REJECTED, Stage.TIME, denied[0][1])
        return None


class EstimateTime:
    """Estimates the device time on a named GPU with the cost model (CPU backend, if asked for)."""

    def run(self, context: GradingContext) -> Outcome | None:
        """See ``GradingStage.run``."""
        options = context.options
        if context.backend != "cpu" or options.estimate is None or context.as_published:
            return None
        from kbx_env.grading.timing import estimate

        start = time.perf_counter()
        context.builder.estimate = estimate.estimate(context.task, context.session, options.estimate, options.sizes)
        context.builder.seconds["estimate"] = time.perf_counter() - start
        return None


def beside_compiled(context: GradingContext, outcome: Outcome) -> Outcome:
    """Add the speedup over torch.compile to a timed outcome.

    It runs after the runner has ended: a process that the submission left running could change a ratio that is reported for
    other submissions too.

    Args:
        context: of this grading, closed.
        outcome: its outcome.

    Returns:
        The outcome; unchanged where nothing was timed or the comparison was not asked for.
    """
    if outcome.timing is None or not context.options.compiled:
        return outcome
    from kbx_env.grading.timing import compiled

    give_back()  # the process that compiles needs the memory
    start = time.perf_counter()
    timing = compiled.beside(context.task, outcome.timing, context.gpu, sizes=context.options.sizes)
    return replace(outcome, timing=timing, seconds={**outcome.seconds, "compiled": round(time.perf_counter() - start, 4)})


def layouts(args: Mapping[str, Any]) -> str:
    """Describe the tensors of a call that are not contiguous.

    Args:
        args: the arguments by name.

    Returns:
        Such as ``input (3, 5) with strides (1, 3)``, separated by commas; "" if all are contiguous.
    """
    return ", ".join(
        f"{name} {tuple(t.shape)} with strides {tuple(t.stride())}"
        for name, t in args.items()
        if isinstance(t, torch.Tensor) and not t.is_contiguous()
    )[:300]


def _unwritten(call: CallResult) -> str:
    """Return a note on elements of the result that were never written, which a GPU would not report."""
    total, missing = sum(o.elements for o in call.origins), sum(o.unwritten for o in call.origins)
    return f"; {100 * missing / total:.3g} % of the elements were never written" if missing else ""
