"""Judges as the paper does: the published comparison with torch's own answer. Only for comparison with published numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from kbx_env.grading import reference
from kbx_env.grading.judge.ruling import PASSED, Answer, Ruling
from kbx_env.spec.task import Case, Task

TABLE = {torch.float16: 5e-3, torch.bfloat16: 5e-3, torch.float32: 1e-5, torch.float64: 1e-5}
"""rtol = atol by dtype; anything else (complex too) is compared bit for bit, as published."""


def rule(task: Task, case: Case, args: Mapping[str, Any], answer: Answer, device: str, generator_seed: int) -> Ruling:
    """Compare an answer with that of the published reference: number of results, dtype, shape, values.

    Strides, aliasing and in-place effects are not compared. Torch's random stream and switches (TF32) are those of a fresh
    process, as in the published script: random results must be torch's own.

    Args:
        task: from ``spec.published``.
        case: one of its cases.
        args: the arguments that were sent.
        answer: the answer to judge.
        device: where the reference is evaluated; that of the call, because its random stream differs.
        generator_seed: of the call, ``CallResult.generator_seed``.

    Returns:
        The ruling.
    """
    if case.unpassable:
        return Ruling(False, case.unpassable)
    try:
        wanted = reference.published(task, case, args, device, generator_seed)
    except Exception as e:
        return Ruling(False, f"the published reference raises {type(e).__name__} here")
    if len(answer.outputs) != len(wanted.native) or answer.is_tuple != wanted.is_tuple:
        returned, expected = _count(len(answer.outputs), answer.is_tuple), _count(len(wanted.native), wanted.is_tuple)
        return Ruling(False, f"returned {returned}, expected {expected}")
    for i, (got, want) in enumerate(zip(answer.outputs, wanted.native, strict=True)):
        want = want.to(got.device)
        if got.dtype != want.dtype or got.shape != want.shape:
            expected = f"{want.dtype} {tuple(want.shape)}"
            return Ruling(False, f"output {i} is {got.dtype} {tuple(got.shape)}, expected {expected}")
        ruling = _compared(task, got, want, i)
        if not ruling.passed:
            return ruling
    return PASSED


def raised(task: Task, case: Case, args: Mapping[str, Any], name: str, text: str) -> Ruling:
    """Compare an exception with that of the published reference, literally, as the published test does.

    Args:
        task: from ``spec.published``.
        case: a case with ``raises``.
        args: the arguments that were sent.
        name: type of the submission's exception.
        text: its text.

    Returns:
        The ruling.
    """
    try:
        reference.published(task, case, args, "cpu", 0)
    except Exception as e:
        same = text == str(e)
        return PASSED if same else Ruling(False, f"raised {name} with another text than the published reference")
    return Ruling(False, f"raised {name}, where the published reference does not")


def _count(n: int, is_tuple: bool) -> str:
    return f"a tuple of {n}" if is_tuple else "a single result"


def _compared(task: Task, got: torch.Tensor, want: torch.Tensor, i: int) -> Ruling:
    """Compare one result in the published way.

    Args:
        task: has the tolerances.
        got: the output.
        want: torch's own output.
        i: index of the output.

    Returns:
        The ruling.
    """
    p = task.paper
    if p.cosine is not None or p.l1 is not None or p.rmse is not None:
        return _quantized(task, got.to(torch.float32).flatten(), want.to(torch.float32).flatten(), i)
    if not (got.dtype.is_floating_point or got.dtype.is_complex):
        return PASSED if torch.equal(got, want) else Ruling(False, f"output {i} is not equal")
    tolerance = TABLE.get(got.dtype, 0.0)
    if torch.allclose(got, want, rtol=tolerance, atol=tolerance, equal_nan=True):
        return PASSED
    return Ruling(False, f"output {i} not within rtol={tolerance:g}, atol={tolerance:g}")


def _quantized(task: Task, got: torch.Tensor, want: torch.Tensor, i: int) -> Ruling:
    """Check the three quantization thresholds: cosine similarity, relative L1 error, root-mean-square error.

    Args:
        task: has the thresholds.
        got: the output, flat, in fp32 as published.
        want: torch's own output, flat, in fp32.
        i: index of the output.

    Returns:
        The ruling.
    """
    p = task.paper
    if torch.equal(got, want):  # the cosine of two zero vectors is 0
        return PASSED
    cosine = float(torch.nn.functional.cosine_similarity(got, want, dim=0))
    l1 = float((got - want).abs().sum() / want.abs().sum().clamp_min(1e-12))
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
