"""Judges by the tolerances of the paper, only for comparison with published numbers."""

from __future__ import annotations

import torch

from kbx_env.grading.judge.ruling import PASSED, Answer, Ruling
from kbx_env.grading.reference import Expected
from kbx_env.spec.task import Task

TABLE = {torch.float16: 5e-3, torch.bfloat16: 5e-3, torch.float32: 1e-5, torch.float64: 1e-5}
"""rtol = atol by dtype; anything else (complex too) is compared bit for bit, as published."""


def rule(task: Task, expected: Expected, answer: Answer) -> Ruling:
    """Check dtype, shape and closeness to torch's own answer; in-place effects and aliasing are not checked.

    Args:
        task: the task.
        expected: the reference's answers.
        answer: the answer to judge.

    Returns:
        The ruling.
    """
    if len(answer.outputs) != len(expected.native):
        return Ruling(False, f"returned {len(answer.outputs)} outputs, expected {len(expected.native)}")
    for i, (got, want) in enumerate(zip(answer.outputs, expected.native, strict=True)):
        want = want.to(got.device)
        if got.dtype != want.dtype or got.shape != want.shape:
            wanted = f"{want.dtype} {tuple(want.shape)}"
            return Ruling(False, f"output {i} is {got.dtype} {tuple(got.shape)}, expected {wanted}")
        p = task.paper
        if p.cosine is not None or p.l1 is not None or p.rmse is not None:
            ruling = _quantized(task, got.to(torch.float64).flatten(), want.to(torch.float64).flatten(), i)
        elif not (got.dtype.is_floating_point or got.dtype.is_complex):
            ruling = PASSED if torch.equal(got, want) else Ruling(False, f"output {i} is not equal")
        else:
            default = TABLE.get(got.dtype, 0.0)
            # The published table is by dtype; tolerances of a single task apply to its fp32 cases.
            single = got.dtype in (torch.float32, torch.float64)
            rtol = p.rtol if single and p.rtol is not None else default
            atol = p.atol if single and p.atol is not None else default
            close = torch.allclose(got, want, rtol=rtol, atol=atol, equal_nan=True)
            ruling = PASSED if close else Ruling(False, f"output {i} not within rtol={rtol:g}, atol={atol:g}")
        if not ruling.passed:
            return ruling
    return PASSED


def _quantized(task: Task, got: torch.Tensor, want: torch.Tensor, i: int) -> Ruling:
    """Check the three quantization thresholds: cosine similarity, relative L1 error, root-mean-square error.

    Args:
        task: has the thresholds.
        got: the output, flat, in fp64.
        want: torch's own output, flat, in fp64.
        i: index of the output.

    Returns:
        The ruling.
    """
    p = task.paper
    if not got.numel():
        return PASSED
    cosine = float(torch.dot(got, want) / (got.norm() * want.norm()).clamp_min(1e-300))
    l1 = float((got - want).abs().sum() / want.abs().sum().clamp_min(1e-300))
    rmse = float((got - want).square().mean().sqrt())
    # Written so that NaN fails.
    within = (
        p.cosine is None or cosine >= p.cosine,
        p.l1 is None or l1 <= p.l1,
        p.rmse is None or rmse <= p.rmse,
    )
    if all(within):
        return PASSED
    found = f"cosine {cosine:.4f} (>= {p.cosine}), l1 {l1:.4f} (<= {p.l1}), rmse {rmse:.4f} (<= {p.rmse})"
    return Ruling(False, f"output {i}: {found}")
