"""Integers, booleans, moved values: bit-equal, and any NaN equals any NaN."""

from __future__ import annotations

import torch

from kbx_env.grading.judge.ruling import PASSED, Answer, Ruling
from kbx_env.grading.judge.structure import pairs
from kbx_env.grading.reference import Expected


def same_values(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Elementwise equality in which NaN equals NaN (and zeros of both signs are equal)."""
    if a.dtype.is_floating_point:
        return (a == b) | (torch.isnan(a) & torch.isnan(b))
    return a == b


def equal_bits(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Elementwise bit equality in which any NaN equals any NaN."""
    same = same_values(a, b)
    # Of all values only the zeros compare equal with different bits.
    return same & ((a != 0) | (torch.signbit(a) == torch.signbit(b))) if a.dtype.is_floating_point else same


def rule(expected: Expected, answer: Answer) -> Ruling:
    """Every output and every tensor written in place, against torch's own answer."""
    for row in pairs(expected, answer):
        right = equal_bits(row.got, row.native.to(row.got.device))
        if not bool(right.all()):
            share = float((~right).to(torch.float64).mean())
            return Ruling(False, f"wrong values: {row.name}, {100 * share:.3g} % of the elements", share, 0.0)
    return PASSED
