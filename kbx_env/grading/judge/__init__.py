"""Judges answers: one judge for each type of criterion. Answers are untrusted claims; rulings never contain values of
inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kbx_env.errors import DeclarationError
from kbx_env.grading import reference
from kbx_env.grading.judge import close, contract, exact, invariant, paper, samples, statistical, structure, windows
from kbx_env.grading.judge.ruling import PASSED, Answer, Ruling
from kbx_env.grading.reference import Expected
from kbx_env.spec.criteria import (
    Close,
    Criterion,
    Dropout,
    Exact,
    Invariant,
    Published,
    QuantizationScheme,
    Sample,
    Windows,
)
from kbx_env.spec.task import Case, Task

__all__ = ["Answer", "Known", "Ruling", "calls_needed", "canaries", "is_trivial", "judge"]

_CLASSES: tuple[type[Criterion], ...] = (Close, Exact, Invariant, Dropout, Published, QuantizationScheme, Sample, Windows)


def calls_needed(task: Task, case: Case) -> int:
    """Return how many calls on the same inputs the judge needs."""
    if isinstance(task.truth, Sample):
        return len(samples.TURNS) if task.truth.generator in case.args else 2
    if isinstance(task.truth, Windows):
        return 2
    return 2 if isinstance(task.truth, Dropout) and statistical.rate_of(task, case)[1] else 1


def _expected(
    task: Task, case: Case, args: Mapping[str, Any], device: str, native: Expected | None = None,
    exact_answer: Expected | None = None,
) -> Expected:  # fmt: skip
    """Evaluate the reference as the task's judge needs it; arguments as for ``judge``."""
    keep = True if isinstance(task.truth, Dropout) else None
    exact = not isinstance(task.truth, Sample | Windows | Exact)  # these compare with torch's own
    return reference.expect(task, case, args, device, keep=keep, exact=exact, native=native, known=exact_answer)


@dataclass
class Known:
    """What rulings on several answers to one call share: equal task, case, arguments and device.

    Attributes:
        expected: the reference's answers, after the first ruling.
        measured: tolerances and conditioning; ``None`` to measure them for each ruling.
    """

    expected: Expected | None = None
    measured: close.Measured | None = None


def judge(
    task: Task,
    case: Case,
    args: Mapping[str, Any],
    answers: Sequence[Answer],
    *,
    device: str = "cpu",
    generator_seeds: Sequence[int] = (),
    timed: bool = False,
    lazy: bool = False,
    earlier: list[Any] | None = None,
    native: Callable[[], Expected] | None = None,
    known: Known | None = None,
) -> Ruling:
    """Rule on the answers of one case.

    Args:
        task: the task.
        case: the case.
        args: the arguments that were sent (never those that the runner claims to have received).
        answers: one per call, ``calls_needed`` of them.
        device: where the reference is evaluated.
        generator_seeds: state of the generator argument at each call; equal numbers stand for equal states. For ``Published``
            they seed torch's own random stream and the generator argument.
        timed: the answers are one answer repeated; statistical comparisons between calls are left out.
        lazy: run the reference in the declared dtypes only if the ruling depends on it. That takes a run without values first,
            which is slower than one with the values of a small case.
        earlier: random numbers of the grading's other cases, which must not be repeated; those of this case are added.
        native: computes torch's own answer on another device than ``device``; called only if the ruling depends on it.
        known: from an earlier ruling on the same call; the reference is not run again.

    Returns:
        The ruling.

    Raises:
        DeclarationError: no judge for this criterion, or too few answers for it.
    """
    if type(task.truth) not in _CLASSES:
        raise DeclarationError(f"{task.id}: no judge for {type(task.truth).__name__}")
    if len(answers) < calls_needed(task, case):
        raise DeclarationError(f"{task.id}: {len(answers)} answers, the judge needs {calls_needed(task, case)}")
    if isinstance(task.truth, Published):
        return paper.rule(task, case, args, answers[0], device, generator_seeds[0] if generator_seeds else 0)
    known, exact_answer = Known() if known is None else known, None
    if lazy and known.expected is None and isinstance(task.truth, Close | Invariant):
        exact_answer = reference.exact_answer(task, case, args, device)
        if exact_answer is not None and _is_plainly_right(task, case, args, exact_answer, answers[0]):
            return PASSED
    if known.expected is None:
        known.expected = _expected(task, case, args, device, native() if native else None, exact_answer)
    return _rule(task, case, args, known.expected, answers, device, generator_seeds, timed, earlier, known.measured)


def _is_plainly_right(task: Task, case: Case, args: Mapping[str, Any], exact_answer: Expected, answer: Answer) -> bool:
    """Return whether an answer passes without torch's own: results at timed sizes are large, and others wait for the GPU."""
    if not structure.rule(task, case, args, exact_answer, answer).passed:
        return False
    if isinstance(task.truth, Invariant):
        return invariant.meets_declared(task.truth, args, exact_answer, answer)
    return isinstance(task.truth, Close) and close.meets_declared(task.truth, exact_answer, answer)


def _is_plainly_wrong(
    task: Task, case: Case, args: Mapping[str, Any], expected: Expected, answer: Answer, measured: close.Measured
) -> bool:  # fmt: skip
    """Return whether some elements of an answer tell that ``_rule`` refuses it; arguments as there."""
    truth, keep = task.truth, None
    if isinstance(truth, Dropout) and not statistical.rate_of(task, case)[1]:
        truth, keep = truth.close, True
    if not isinstance(truth, Close) or not structure.rule(task, case, args, expected, answer).passed:
        return False
    return close.plainly_wrong(truth, task, case, args, expected, answer, measured, keep=keep)


def _rule(
    task: Task, case: Case, args: Mapping[str, Any], expected: Expected, answers: Sequence[Answer], device: str,
    generator_seeds: Sequence[int], timed: bool, earlier: list[Any] | None = None, measured: close.Measured | None = None,
    variants: Sequence[contract.Variant] | None = None,
) -> Ruling:  # fmt: skip
    """Rule on answers against an evaluated reference; arguments as for ``judge``, ``variants`` as for ``contract.rule``."""
    truth = task.truth
    for answer in answers:
        ruling = structure.rule(task, case, args, expected, answer)
        if not ruling.passed:
            return ruling
    match truth:
        case Close():
            return close.rule(truth, task, case, args, expected, answers[0], device, measured=measured)
        case Exact():
            return exact.rule(expected, answers[0])
        case Invariant():
            return invariant.rule(truth, args, expected, answers[0])
        case Dropout():
            more: dict[str, Any] = {"timed": timed, "earlier": earlier}
            return statistical.rule_dropout(truth, task, case, args, expected, answers, device, **more)
        case QuantizationScheme():
            return contract.rule(truth, task, case, args, expected, answers[0], device, variants)
        case Sample():
            return samples.rule(truth, case, args, answers, generator_seeds, timed=timed, earlier=earlier)
        case Windows():
            return windows.rule(truth, args, answers, timed=timed, earlier=earlier)
    raise DeclarationError(f"{task.id}: no judge for {type(truth).__name__}")


def result_shape(task: Task, case: Case, args: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the shape of a call's first result.

    Args:
        task: the task.
        case: the case.
        args: the arguments of the call.

    Returns:
        The shape.
    """
    return tuple(reference.expect(task, case, args, "cpu", exact=False).native[0].shape)


def canaries(task: Task, case: Case, args: Mapping[str, Any], expected: Expected) -> dict[str, Answer]:
    """Return answers that need no computation. If the judge passes one of them, it is too lenient or the case proves
    nothing.

    Args:
        task: the task.
        case: the case.
        args: the arguments of the call.
        expected: the reference's answers.

    Returns:
        By name: zeros, ones, the mean of the right answer, and copies of inputs.
    """
    untouched = {k: v for k, v in args.items() if isinstance(v, torch.Tensor)}
    changed = task.written(case.args)
    aliases = tuple(
        "out" if case.out and i == 0 else a if a in changed else None for i, a in enumerate(expected.aliases)
    )

    def answer(make: Any) -> Answer:
        # A tensor that should be written in place and returned is returned unchanged.
        outputs = [untouched[a] if a in untouched else make(o) for a, o in zip(aliases, expected.native, strict=True)]
        return Answer(tuple(outputs), expected.is_tuple, untouched, aliases, aliases)

    def mean(o: torch.Tensor) -> torch.Tensor:
        if o.is_complex():
            return torch.full_like(o, complex(o.mean()) if o.numel() > 1 else 0.0)
        if o.numel() < 2 or not o.dtype.is_floating_point:
            return torch.zeros_like(o)
        finite = o.to(torch.float64)[torch.isfinite(o)]
        return torch.full_like(o, float(finite.mean()) if finite.numel() else 0.0)

    found = {
        "zeros": answer(torch.zeros_like),
        "ones": answer(torch.ones_like),
    }
    if any(o.numel() > 1 and o.dtype.is_floating_point for o in expected.native):
        found["mean"] = answer(mean)  # the mean of a single number is the right answer
    for name, value in untouched.items():
        first = expected.native[0]
        if value.dtype == first.dtype and value.shape == first.shape:
            found[f"copy of {name}"] = answer(
                lambda o, v=value: v.clone() if (v.dtype, v.shape) == (o.dtype, o.shape) else torch.zeros_like(o)
            )
    return found


def is_trivial(task: Task, case: Case, args: Mapping[str, Any], known: Known | None = None) -> bool:
    """Return whether an answer that needs no computation would be right in a case, so that passing it proves nothing.

    Args:
        task: the task.
        case: the case.
        args: the arguments of the call.
        known: receives the reference's answers and the tolerances, for the ruling on the answer to this call.

    Returns:
        True also where the answer has no elements, or dropout drops all.
    """
    known = Known() if known is None else known
    known.expected = expected = _expected(task, case, args, "cpu")
    if all(o.numel() == 0 for o in expected.native) and not any(v.numel() for v in expected.native_written.values()):
        return True
    if isinstance(task.truth, Dropout) and statistical.rate_of(task, case)[0] >= 1.0:
        return True
    known.measured = close.Measured()
    shared: dict[str, Any] = {"measured": known.measured}
    if isinstance(task.truth, QuantizationScheme):
        shared["variants"] = list(contract.variants(task, case, args, expected, "cpu"))
    for answer in canaries(task, case, args, expected).values():
        if _is_plainly_wrong(task, case, args, expected, answer, known.measured):
            continue
        answers = [answer] * calls_needed(task, case)
        if _rule(task, case, args, expected, answers, "cpu", (), True, **shared) == PASSED:
            return True
    return False
