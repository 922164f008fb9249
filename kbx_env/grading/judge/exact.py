"""Judges integers, booleans and moved values: equal bits, and any NaN equals any NaN."""

from __future__ import annotations

import torch

from kbx_env.grading.judge.ruling import PASSED, Answer, Ruling
from kbx_env.grading.judge.structure import pairs
from kbx_env.grading.reference import Expected


def same_values(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return elementwise equality in which NaN equals NaN (and zeros of both signs are equal): a boolean tensor."""
    if a.dtype.is_floating_point:
        return (a == b) | (torch.isnan(a) & torch.isnan(b))
    return a == b


def equal_bits(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return elementwise bit equality in which any NaN equals any NaN: a boolean tensor."""
    same = same_values(a, b)
    # Only zeros compare equal with different bits.
    return same & ((a != 0) | (torch.signbit(a) == torch.signbit(b))) if a.dtype.is_floating_point else same


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers by bytes of an element."""


def _identical(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether all bits are equal. It takes one kernel; ``equal_bits`` takes a dozen."""
    bits = _BITS.get(a.element_size())
    return a.dtype == b.dtype and bits is not None and torch.equal(a.view(bits), b.view(bits))


def rule(expected: Expected, answer: Answer) -> Ruling:
    """Compare every output and every tensor written in place with torch's own answer.

    Args:
        expected: the reference's answers.
        answer: the answer to judge.

    Returns:
        The ruling; its error is the share of wrong elements.
    """
    for row in pairs(expected, answer):
        if _identical(row.got, row.native.to(row.got.device)):
            continue
        correct = equal_bits(row.got, row.native.to(row.got.device))
        if not bool(correct.all()):
            share = float((~correct).to(torch.float64).mean())
            return Ruling(False, f"wrong values: {row.name}, {100 * share:.3g} % of the elements", share, 0.0)
    return PASSED
