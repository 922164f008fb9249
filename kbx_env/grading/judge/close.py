"""Floating point: error against the fp64 truth, at most a floor or k times the error torch itself makes."""

from __future__ import annotations

import math

import torch

from kbx_env.grading.judge.exact import same_values
from kbx_env.grading.judge.ruling import PASSED, Answer, Ruling
from kbx_env.grading.judge.structure import pairs
from kbx_env.grading.reference import Expected
from kbx_env.truth import Close


def tolerance(truth: Close, exact: torch.Tensor, native: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Allowed absolute error per element (fp64).

    floor = ulps * eps * scale, raised to k times the largest error (in units of eps * scale) that torch makes here.
    """
    info = torch.finfo(dtype)
    finite = torch.isfinite(exact)
    magnitude = torch.where(finite, exact.abs(), 0.0)
    if truth.scale == "tensor" and exact.numel():
        rms = float(magnitude.square().sum().div(max(1, int(finite.sum()))).sqrt())
        scale = magnitude.clamp_min(rms)
    else:
        scale = magnitude
    # fp32, bf16: kernels may flush subnormal numbers to zero, as the GPU does in fast modes; fp16 keeps them
    unit = info.eps * scale + info.smallest_normal * (info.eps if dtype is torch.float16 else 1.0)
    own = (native.to(torch.float64) - exact).abs() / unit
    own = own[finite & torch.isfinite(own)]
    worst = float(own.max()) if own.numel() else 0.0
    return unit * max(truth.ulps, truth.k * worst)


def misses(truth: Close, got: torch.Tensor, exact: torch.Tensor, native: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(error in units of the tolerance, mask of wrong elements) for one tensor."""
    dtype = got.dtype
    got64, exact, native = got.to(exact.device, torch.float64), exact.to(torch.float64), native.to(exact.device)
    limit = tolerance(truth, exact, native, dtype)
    top = torch.finfo(dtype).max
    # Near overflow the rounded truth may be the largest number or infinity; both are right.
    beyond = exact.abs() > top * (1 - torch.finfo(dtype).eps)
    over = beyond & torch.isfinite(exact) & (torch.sign(got64) == torch.sign(exact)) & (got64.abs() >= top * 0.99)
    same = same_values(got64, exact) | over
    ratio = (got64 - exact).abs() / limit
    ratio = torch.where(same, 0.0, torch.where(torch.isfinite(ratio), ratio, math.inf))
    return ratio, ratio > 1.0


def describe(name: str, ratio: torch.Tensor, wrong: torch.Tensor, got: torch.Tensor) -> Ruling:
    """A ruling that says how far and how much, never which value."""
    worst = float(ratio.max())
    share = 100.0 * float(wrong.to(torch.float64).mean())
    odd = got[wrong.to(got.device)]
    if odd.numel() and not bool(torch.isfinite(odd).all()):
        return Ruling(False, f"wrong values: {name} holds NaN or infinity where the result is finite (or the reverse)", worst)
    return Ruling(False, f"wrong values: {name} is off by {worst:.3g} times the tolerance, {share:.3g} % of the elements", worst)


def rule(truth: Close, expected: Expected, answer: Answer) -> Ruling:
    """Every output and every tensor written in place."""
    for name, got, exact, native in pairs(expected, answer):
        if not got.dtype.is_floating_point:
            if not bool(same_values(got, native.to(got.device)).all()):
                return Ruling(False, f"wrong values: {name}")
            continue
        if got.shape != exact.shape:
            return Ruling(False, f"{name} has shape {tuple(got.shape)}, expected {tuple(exact.shape)}")
        ratio, wrong = misses(truth, got, exact, native)
        if bool(wrong.any()):
            return describe(name, ratio, wrong, got)
    return PASSED
