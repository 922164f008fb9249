"""Judges quantized tasks: the result must agree with the declared scheme under one of the honest rounding formulas.

A result that is more exact than the scheme is as wrong as a coarser one: a float product agrees with none of the
formulas.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, TypeAlias

import torch

from kbx_env.errors import DeclarationError
from kbx_env.grading import reference
from kbx_env.grading.judge.close import declared_tolerance, describe, misses
from kbx_env.grading.judge.ruling import PASSED, Answer, Ruling
from kbx_env.grading.judge.structure import pairs
from kbx_env.grading.reference import Expected
from kbx_env.spec.criteria import Close, QuantizationScheme
from kbx_env.spec.task import Case, Task

Variant: TypeAlias = tuple[Expected, torch.Tensor | float]
"""The scheme's answers under one combination of rounding formulas, and the absolute error that is allowed beside the tolerance."""


def variants(
    task: Task, case: Case, args: Mapping[str, Any], expected: Expected, device: str
) -> Iterator[Variant]:  # fmt: skip
    """Evaluate the scheme under each combination of rounding formulas.

    Args:
        task: the task.
        case: the case.
        args: the arguments of the call.
        expected: the reference's answers; has the number of rounded operands.
        device: where the reference is evaluated.

    Yields:
        One variant for each combination.

    Raises:
        DeclarationError: more rounded operands than combinations can be tried for.
    """
    from kbx_env.tasks._schemes import FORMULAS, SLACK

    if expected.decisions > 4:
        raise DeclarationError(f"{task.id}: {expected.decisions} rounded operands are too many to enumerate")
    results = [*expected.native, *expected.native_written.values()]
    # Only integers are compared with torch's own answer, which depends on the formulas as well.
    native = expected if all(o.dtype.is_floating_point for o in results) else None
    resolved = None if task.written(case.args) else reference.resolve(args, device, exact=True)
    for formulas in itertools.product(FORMULAS, repeat=expected.decisions):
        # The reference sets SLACK if it has roundings that cannot be enumerated: by so much they change its result.
        variant = reference.expect(task, case, args, device, rounding=formulas, native=native, resolved=resolved)
        slack = SLACK.get()
        yield variant, 0.0 if slack is None else slack


def rule(
    truth: QuantizationScheme, task: Task, case: Case, args: Mapping[str, Any], expected: Expected, answer: Answer,
    device: str, known: Iterable[Variant] | None = None,
) -> Ruling:  # fmt: skip
    """Check that each element agrees with one combination of rounding formulas to fp32 accuracy.

    Args:
        truth: the scheme.
        task: the task.
        case: the case.
        args: the arguments of the call.
        expected: the reference's answers; has the number of rounded operands.
        answer: the answer to judge.
        device: where the reference is evaluated.
        known: from ``variants``, where several answers to one call are judged; the reason then says nothing of noise.

    Returns:
        The ruling; the error is in units of the tolerance.

    Raises:
        DeclarationError: more rounded operands than combinations can be tried for.
    """
    best: dict[str, torch.Tensor] = {}
    for variant, slack in variants(task, case, args, expected, device) if known is None else known:
        for name, got, exact, native, _ in pairs(variant, answer):
            if got.dtype.is_floating_point:
                # Torch's own error is no allowance, because integer accumulation is exact. A 16-bit result is rounded once;
                # 8 of its coarse units would exceed the quantization error itself.
                close = Close(k=0.0, ulps=truth.ulps if torch.finfo(got.dtype).bits >= 32 else 1.0)
                tolerance = declared_tolerance(close, got.dtype, exact.to(torch.float64))
                ratio, _ = misses(close, got, exact, native, slack, tolerance=tolerance)
            else:
                ratio = torch.where(got == native.to(got.device), 0.0, 2.0)
            best[name] = torch.minimum(best[name], ratio) if name in best else ratio
        if all(not bool((ratio > 1.0).any()) for ratio in best.values()):
            break
    for name, got, *_ in pairs(expected, answer):
        if bool((best[name] > 1.0).any()):
            found = describe(name, best[name], best[name] > 1.0, got)
            if known is not None:  # nobody reads the reason
                return found
            return replace(found, reason=f"{found.reason}; {_noise(task, case, args, expected, answer, device)}")
    return PASSED


def sqnr(got: torch.Tensor, plain: torch.Tensor) -> float:
    """Return the signal-to-quantization-noise ratio: 10 log10(|plain|^2 / |got - plain|^2), independent of the inputs'
    scale.

    Args:
        got: the quantized result.
        plain: the unquantized result, in fp64.

    Returns:
        Decibels.
    """
    noise = float((got.to(torch.float64).cpu() - plain.cpu()).square().sum())
    signal = float(plain.square().sum())
    ratio = signal / noise if noise else math.inf
    return 10 * math.log10(ratio) if ratio > 0 else -math.inf  # also if the noise is infinite or NaN


def _noise(task: Task, case: Case, args: Mapping[str, Any], expected: Expected, answer: Answer, device: str) -> str:
    """Return a text with the noise of the answer and of the ideal scheme; arguments as for ``rule``."""
    from kbx_env.tasks._schemes import EXACT

    formulas = (EXACT,) * max(1, expected.decisions)
    plain = pairs(reference.expect(task, case, args, device, rounding=formulas), answer)[0]
    ideal = pairs(expected, answer)[0].exact
    answered, best = sqnr(plain.got, plain.exact), sqnr(ideal, plain.exact)
    return f"{answered:.1f} dB of signal to noise beside the unquantized result, the scheme has {best:.1f} dB"
