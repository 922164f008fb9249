"""Quantization: the ideal result of the stated scheme under one of the honest roundings, from both sides.

Too exact is as wrong as too coarse: a float product misses every variant.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import torch

from kbx_env.grading import reference
from kbx_env.grading.judge.close import describe, misses
from kbx_env.grading.judge.ruling import PASSED, Answer, Ruling
from kbx_env.task import Case, Task
from kbx_env.truth import Close, Contract


def rule(truth: Contract, task: Task, case: Case, args: Mapping[str, Any], answer: Answer, device: str) -> Ruling:
    """Each element must agree with one combination of roundings to fp32 accuracy."""
    from kbx_env.tasks._schemes import FORMULAS

    best: torch.Tensor | None = None
    for formulas in itertools.product(FORMULAS, repeat=2):
        expected = reference.expect(task, case, args, device, rounding=formulas)
        # k = 0: torch's own error is no excuse, integer accumulation is exact
        ratio, _ = misses(Close(k=0.0, ulps=truth.ulps), answer.outputs[0], expected.outputs[0], expected.native[0])
        best = ratio if best is None else torch.minimum(best, ratio)
    assert best is not None
    wrong = best > 1.0
    return describe("output 0", best, wrong, answer.outputs[0]) if bool(wrong.any()) else PASSED
