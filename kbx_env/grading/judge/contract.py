"""Quantization: the ideal result of the stated scheme under one of the honest roundings, from both sides.

Too exact is as wrong as too coarse: a float product misses every variant.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import torch

from kbx_env.errors import DeclarationError
from kbx_env.grading import reference
from kbx_env.grading.judge.close import describe, misses
from kbx_env.grading.judge.ruling import PASSED, Answer, Ruling
from kbx_env.grading.judge.structure import pairs
from kbx_env.grading.reference import Expected
from kbx_env.task import Case, Task
from kbx_env.truth import Close, Contract


def rule(
    truth: Contract, task: Task, case: Case, args: Mapping[str, Any], expected: Expected, answer: Answer, device: str
) -> Ruling:
    """Each element must agree with one combination of roundings to fp32 accuracy."""
    from kbx_env.tasks._schemes import FORMULAS

    if expected.decisions > 4:
        raise DeclarationError(f"{task.id}: {expected.decisions} rounded operands are too many to enumerate")
    best: dict[str, torch.Tensor] = {}
    for formulas in itertools.product(FORMULAS, repeat=expected.decisions):
        variant = reference.expect(task, case, args, device, rounding=formulas) if formulas else expected
        for name, got, exact, native in pairs(variant, answer):
            if got.dtype.is_floating_point:
                # k = 0: torch's own error is no excuse, integer accumulation is exact. A 16-bit result is
                # rounded once; 8 of its coarse units would swallow the quantization error itself.
                ulps = truth.ulps if torch.finfo(got.dtype).bits >= 32 else 1.0
                ratio, _ = misses(Close(k=0.0, ulps=ulps), got, exact, native)
            else:
                ratio = torch.where(got == native.to(got.device), 0.0, 2.0)
            best[name] = torch.minimum(best[name], ratio) if name in best else ratio
    for name, got, _, _ in pairs(expected, answer):
        if bool((best[name] > 1.0).any()):
            return describe(name, best[name], best[name] > 1.0, got)
    return PASSED
