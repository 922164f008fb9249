"""Integers, booleans, moved values: equal, and any NaN equals any NaN."""

from __future__ import annotations

import torch

from kbx_env.grading.judge.ruling import PASSED, Answer, Ruling
from kbx_env.grading.judge.structure import pairs
from kbx_env.grading.reference import Expected


def same_values(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Elementwise equality in which NaN equals NaN."""
    if a.dtype.is_floating_point:
        return (a == b) | (torch.isnan(a) & torch.isnan(b))
    return a == b


def rule(expected: Expected, answer: Answer) -> Ruling:
    """Every output and every tensor written in place, against torch's own answer."""
    for name, got, _, native in pairs(expected, answer):
        right = same_values(got, native.to(got.device))
        if not bool(right.all()):
            share = 100.0 * float((~right).to(torch.float64).mean())
            return Ruling(False, f"wrong values: {name}, {share:.3g} % of the elements")
    return PASSED
