"""Floating point: error against the fp64 truth, at most a floor or k times the error torch itself makes.

Where that fails, the conditioning of the problem is measured (see ``loosen``): torch may have been lucky, and a
fair order of summation must never fail.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from kbx_env.grading import compulsory_work, reference
from kbx_env.grading.judge.exact import same_values
from kbx_env.grading.judge.ruling import PASSED, Answer, Ruling
from kbx_env.grading.judge.structure import pairs
from kbx_env.grading.reference import Expected
from kbx_env.spec.criteria import Close
from kbx_env.spec.task import Case, Task

CLIP = 16.0
"""Elements beyond this many medians do not raise the root-mean-square: one giant must not excuse all others."""
GROSS = 16.0
"""Beyond this many tolerances an element is not a matter of luck."""
REUSED = 8.0
"""A matrix product does more than so many operations with every number it reads."""
COARSE = 2.0
"""Units of a 16-bit result that are allowed whatever the task says."""
LUCK = 12.0
"""How far the root-mean-square of ``reference.DRAWS`` draws may lie below what it estimates: below 1/12 in one of 10**8 elements
(chi-square of eight degrees of freedom). A product of 8192 x 8192 has 7 x 10**7 elements, and thirty of them are judged."""
NEIGHBOURS = 0.5
"""Share of the noise that is usual in an element's row and column which the element has at least, as far as ``LUCK`` allows."""
JUMP = 2.0**20
"""A result that moves by more than this per unit of input noise has jumped (floor, sign, a mask), not moved."""


def _magnitude(scale: str, exact: torch.Tensor) -> torch.Tensor:
    """The local scale per element: its own size, for ``tensor`` at least the root-mean-square of all."""
    magnitude = torch.where(torch.isfinite(exact), exact.abs(), 0.0)
    if scale == "tensor" and exact.numel():
        flat = magnitude.flatten()
        sample = flat[:: max(1, flat.numel() >> 20)]
        sample = sample[sample > 0]
        cap = CLIP * float(sample.median()) if sample.numel() else 0.0
        rms = float(flat.clamp_max(cap).square().mean().sqrt())
        magnitude = magnitude.clamp_min(rms)
    return magnitude


def _units(truth: Close, exact: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """eps(dtype) times the local scale, per element."""
    info = torch.finfo(dtype)
    magnitude = _magnitude(truth.scale, exact)
    # fp16 has subnormals that kernels do not flush; the tiny numbers of the others may be flushed to zero.
    least = 2.0**-24 if dtype is torch.float16 else info.smallest_normal
    return info.eps * magnitude + least


def misses(
    truth: Close, got: torch.Tensor, exact: torch.Tensor, native: torch.Tensor, slack: torch.Tensor | float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """(error in units of the tolerance, mask of wrong elements) for one tensor; ``slack`` is absolute."""
    dtype = got.dtype
    info = torch.finfo(dtype)
    got64, exact, native = got.to(exact.device, torch.float64), exact.to(torch.float64), native.to(exact.device)
    unit = _units(truth, exact, dtype)
    own = (native.to(torch.float64) - exact).abs() / unit
    own = own[torch.isfinite(own)]
    if truth.scale == "element" and own.numel():
        # Beside its own size torch's error at a sum that cancels is huge too; it must not excuse every other element.
        own = own[:: max(1, own.numel() >> 20)]
        own = own.kthvalue(math.ceil(0.99 * own.numel())).values
    worst = float(own.max()) if own.numel() else 0.0
    # Sixteen bits are rounded once. More of their coarse units would hide operands of fewer bits than were given.
    ulps = truth.ulps if info.bits >= 32 else min(truth.ulps, COARSE)
    limit = torch.maximum(unit * max(ulps, truth.k * worst), torch.as_tensor(slack, device=unit.device))
    top = torch.finfo(dtype).max
    # Near overflow the rounded truth may be the largest number or infinity; both are right.
    beyond = torch.isfinite(exact) & (exact.abs() > top * (1 - torch.finfo(dtype).eps))
    over = beyond & (torch.sign(got64) == torch.sign(exact)) & (got64.abs() >= top * 0.99)
    ratio = (got64 - exact).abs() / limit
    ratio = torch.where(same_values(got64, exact) | over, 0.0, torch.where(torch.isfinite(ratio), ratio, math.inf))
    return ratio, ratio > 1.0


def _products(task: Task, case: Case, expected: Expected) -> float:
    """Operations per result of a task that uses every number more than once (tensor cores serve those), otherwise 0."""
    results = max(1, sum(o.numel() for o in expected.native))
    flops, read = compulsory_work.operations(task, case), sum(compulsory_work.numels(task, case).values())
    return flops / results if flops > REUSED * read else 0.0


def growth(task: Task, case: Case, expected: Expected) -> float:
    """How much rounding errors pile up on the longest fair path: the square root of the work per result.

    A plain loop over K products of rms s leaves an error of 0.20 K s eps (each of the K partial sums, s sqrt(k) large,
    is rounded once); ``sensitivity`` of the same sum is 0.82 s sqrt(K). Their ratio, 0.25 sqrt(K), is one standard
    deviation; the work is 2 K, so that its square root is nearly six of them. A tensor core cuts off instead of
    rounding (Fasi et al., 2021), once in 16 products: its errors add up in one direction, in proportion to K.
    """
    results = max(1, sum(o.numel() for o in expected.native))
    flops, read = compulsory_work.operations(task, case), sum(compulsory_work.numels(task, case).values())
    # Only what is used more than once goes through a tensor core: a plain sum has no such excuse.
    products = _products(task, case, expected)
    # At 256 TF32 still fails: its operands' noise is 2**12 fp32 epsilons, five times what the typical element may have.
    # With 16-bit operands there is no TF32 to tell apart: on an H200 products of depth 4096 and 8192 used 1.1 and 2.3 times
    # what the same share of the depth allowed, at 16 and 2000 of 10**8 elements.
    half = all(o.dtype in reference.HALVES for o in expected.native)
    cut = min(1024.0, products / 8) if half else min(256.0, products / 32)
    return max(min(64.0, max(4.0, math.sqrt(max(flops, read) / results))), cut)


def loosen(truth: Close, moved: torch.Tensor, exact: torch.Tensor, dtype: torch.dtype, grown: float) -> torch.Tensor:
    """Absolute error that rounding in the arithmetic's precision may cause, from the measured conditioning."""
    eps = torch.finfo(torch.float64 if dtype is torch.float64 else torch.float32).eps
    scale = _units(truth, exact, dtype) / torch.finfo(dtype).eps
    # Beside its own size a sum that cancels to nearly zero moves without bound; only beside the others is it a jump.
    jumped = moved > JUMP * (_magnitude("tensor", exact) + torch.finfo(dtype).smallest_normal)
    amplified = torch.where(jumped, 0.0, moved / scale)
    if not amplified.numel():
        return amplified
    flat = amplified.flatten()[:: max(1, amplified.numel() >> 20)]
    # A few steep elements must not excuse the rest: they keep their own slack, the others the typical one.
    low = flat[flat <= flat.kthvalue(max(1, math.ceil(0.95 * flat.numel()))).values]
    typical = float(low.square().mean().sqrt())
    return eps * grown * scale * amplified.clamp_min(3.0 * typical)


def without_luck(moved: torch.Tensor) -> torch.Tensor:
    """Correct a product's measured noise where chance made it small.

    An element of a matrix product has about the noise of its row and its column. A few draws of noise show some of millions of
    elements as calm, and a right kernel would be wrong there.

    Args:
        moved: root-mean-square of ``reference.DRAWS`` draws, at least two axes for anything to change.
    """
    if moved.ndim < 2 or not moved.numel():
        return moved
    usual = torch.minimum(moved.median(-1, keepdim=True).values, moved.median(-2, keepdim=True).values)
    return torch.maximum(moved, torch.minimum(NEIGHBOURS * usual, LUCK * moved))


def describe(name: str, ratio: torch.Tensor, wrong: torch.Tensor, got: torch.Tensor) -> Ruling:
    """A ruling that says how far and how much, never which value."""
    worst = float(ratio.max())
    share = 100.0 * float(wrong.to(torch.float64).mean())
    odd = got[wrong.to(got.device)]
    if odd.numel() and (math.isinf(worst) or not bool(torch.isfinite(odd).all())):
        text = f"wrong values: {name} holds NaN or infinity where the result is finite (or the reverse)"
        return Ruling(False, text, worst, 1.0)
    text = f"wrong values: {name} is off by {worst:.3g} times the tolerance, {share:.3g} % of the elements"
    return Ruling(False, text, worst, 1.0)


def rule(
    truth: Close, task: Task, case: Case, args: Mapping[str, Any], expected: Expected, answer: Answer,
    device: str = "cpu", *, keep: bool | torch.Tensor | None = None,
) -> Ruling:  # fmt: skip
    """Every output and every tensor written in place."""
    moved: dict[int, list[torch.Tensor]] = {}
    every = truth
    for i, (name, got, exact, native) in enumerate(pairs(expected, answer)):
        truth = replace(every, ulps=every.of[i % len(every.of)]) if every.of else every
        if not got.dtype.is_floating_point:
            wrong = ~same_values(got, native.to(got.device))
            if bool(wrong.any()):
                share = float(wrong.to(torch.float64).mean())
                return Ruling(False, f"wrong values: {name}, {100 * share:.3g} % of the elements", share, 0.0)
            continue
        ratio, wrong = misses(truth, got, exact, native)
        for draws in (1, reference.DRAWS):
            if not bool(wrong.any()):
                break
            if draws not in moved:
                outputs, written = reference.sensitivity(task, case, args, expected, device, keep=keep, draws=draws)
                moved[draws] = [*outputs, *written.values()]
                if draws == reference.DRAWS and _products(task, case, expected):
                    moved[draws] = [without_luck(m) for m in moved[draws]]
            extra = loosen(truth, moved[draws][i], exact.to(torch.float64), got.dtype, growth(task, case, expected))
            ratio, wrong = misses(truth, got, exact, native, extra)
            # One draw misleads about single elements only: what is grossly wrong needs no more of them.
            if float((ratio > GROSS).to(torch.float64).mean()) > 0.01:
                break
        if bool(wrong.any()):
            return describe(name, ratio, wrong, got)
    return PASSED
