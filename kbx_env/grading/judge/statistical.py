"""Random results: dropout masks and samples. Any stream will do; what it must look like is checked.

Every threshold is at about 6 standard deviations (p = 2e-9), so that an honest kernel practically never fails.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from kbx_env.grading import reference
from kbx_env.grading.judge import close
from kbx_env.grading.judge.ruling import PASSED, Answer, Ruling
from kbx_env.grading.judge.structure import same_bits
from kbx_env.grading.reference import Expected
from kbx_env.task import Case, Task
from kbx_env.truth import Dropout, Sample

SIGMAS = 6.0


def rate_of(task: Task, case: Case) -> tuple[float, bool]:
    """(drop probability, whether anything is dropped) of a case."""
    truth = task.truth
    assert isinstance(truth, Dropout)
    bound = {n: p.default for n, p in task.signature.parameters.items()} | dict(case.args)
    p = float(bound[truth.rate])
    return p, bool(bound[truth.active]) and 0.0 < p < 1.0


def _too_far(observed: float, p: float, n: float) -> bool:
    return n > 0 and abs(observed - p) > SIGMAS * math.sqrt(max(p * (1 - p), 1e-12) / n) + 1.0 / n


def _patterned(mask: torch.Tensor, p: float) -> str | None:
    """Structure in a mask of one probability: neighbours, rows, columns, periods."""
    flat = mask.flatten().to(torch.float64) - p
    n, var = flat.numel(), max(p * (1 - p), 1e-12)
    lag = 1
    while lag <= n // 2 and n * var > 50:
        r = float((flat[lag:] * flat[:-lag]).sum()) / (var * math.sqrt(n - lag))
        if abs(r) > SIGMAS + 2:
            return f"elements {lag} apart are dropped together"
        lag *= 2
    if mask.dim() >= 2 and n * var > 200:
        for dim, name in ((-1, "rows"), (-2, "columns")):
            counts = flat.view(mask.shape).sum(dim).flatten()
            size = mask.shape[dim]
            chi = float((counts.square() / (size * var)).sum())
            dof = counts.numel()
            if dof > 1 and chi > dof + 8 * math.sqrt(2 * dof) + 40:
                return f"{name} are dropped as a whole"
    return None


def rule_dropout(
    truth: Dropout, task: Task, case: Case, args: Mapping[str, Any], kept: Expected, answers: Sequence[Answer], device: str,
    *, timed: bool = False,
) -> Ruling:  # fmt: skip
    """Kept values right, dropped values right, and a mask that is fresh and unstructured."""
    p, active = rate_of(task, case)
    if not active:
        return close.rule(truth.close, kept, answers[0])
    dropped = reference.expect(task, case, args, device, keep=False)
    masks, clear = [], None
    for answer in answers:
        got = answer.outputs[0]
        ratio_k, _ = close.misses(truth.close, got, kept.outputs[0], kept.native[0])
        ratio_d, _ = close.misses(truth.close, got, dropped.outputs[0], dropped.native[0])
        best = torch.minimum(ratio_k, ratio_d)
        if bool((best > 1.0).any()):
            return close.describe("output 0 (as kept or as dropped)", best, best > 1.0, got)
        # Only where kept and dropped are far apart does the value tell the mask.
        apart, _ = close.misses(truth.close, dropped.native[0], kept.outputs[0], kept.native[0])
        clear = apart > 4.0
        masks.append((ratio_k <= ratio_d).cpu())
    assert clear is not None
    clear = clear.cpu()
    n = int(clear.sum())
    for mask in masks:
        rate = float(mask[clear].to(torch.float64).mean()) if n else 1 - p
        if _too_far(rate, 1 - p, n):
            return Ruling(False, f"keep rate {rate:.4f}, expected {1 - p:.4f} over {n} elements")
    if n == clear.numel() and n:
        found = _patterned(masks[0], 1 - p)
    else:
        found = _patterned(masks[0][clear], 1 - p) if n else None
    if found:
        return Ruling(False, f"the mask has a pattern: {found}")
    if not timed and n * p * (1 - p) > 50:
        agree = float((masks[0] == masks[1])[clear].to(torch.float64).mean())
        if _too_far(agree, p * p + (1 - p) ** 2, n):
            return Ruling(False, f"two calls drop the same elements too often (agreement {agree:.3f})")
    return PASSED


def rule_sample(
    truth: Sample, task: Task, case: Case, args: Mapping[str, Any], answers: Sequence[Answer], *, timed: bool = False
) -> Ruling:
    """Uniform samples: structure, range, distribution, resolution, independence, and the generator's promise."""
    native = reference.expect(task, case, args, "cpu").native[0]
    for answer in answers:
        if len(answer.outputs) != 1 or answer.is_tuple:
            return Ruling(False, "expected one tensor")
        x = answer.outputs[0]
        if x.dtype != native.dtype or x.shape != native.shape:
            return Ruling(False, f"output is {x.dtype} {tuple(x.shape)}, expected {native.dtype} {tuple(native.shape)}")
        if case.out and answer.aliases[0] != "out" and x.numel():
            return Ruling(False, "output 0 must be the tensor 'out' itself")
        found = _not_uniform(x.to("cpu"))
        if found:
            return Ruling(False, found)
    if timed or native.numel() == 0:
        return PASSED
    first, second = answers[0].outputs[0], answers[1].outputs[0]
    if truth.generator is not None and truth.generator in case.args:
        if not same_bits(first, second):
            return Ruling(False, "two generators with the same seed gave different samples")
        if same_bits(first, answers[2].outputs[0]):
            return Ruling(False, "generators with different seeds gave the same samples")
    elif same_bits(first, second):
        return Ruling(False, "two calls gave the same samples")
    elif first.numel() >= 256:
        a, b = first.to(torch.float64).flatten() - 0.5, second.to(torch.float64).flatten() - 0.5
        if abs(float((a * b).sum())) > SIGMAS * math.sqrt(first.numel()) / 12 * 1.5:
            return Ruling(False, "two calls are correlated")
    return PASSED


def _not_uniform(x: torch.Tensor) -> str | None:
    if x.numel() == 0:
        return None
    y = x.to(torch.float64).flatten()
    if not bool(((y >= 0) & (y < 1)).all()):
        return "samples outside [0, 1)"
    n = y.numel()
    if n >= 16 and bool((y == y[0]).all()):
        return "all samples are equal"
    if n < 256:
        return None
    z = (float(y.mean()) - 0.5) * math.sqrt(12 * n)
    if abs(z) > SIGMAS:
        return f"mean is {z:.1f} standard errors off"
    z = (float((y - 0.5).square().mean()) - 1 / 12) / math.sqrt(1 / 180 / n)
    if abs(z) > SIGMAS:
        return f"variance is {z:.1f} standard errors off"
    ordered = y.sort().values
    grid = torch.arange(1, n + 1, dtype=torch.float64) / n
    distance = float(torch.maximum(grid - ordered, ordered - grid + 1 / n).max())
    if distance * math.sqrt(n) > 3.3:  # Kolmogorov: P(sqrt(n) D > 3.3) < 1e-9
        return f"not uniform: Kolmogorov-Smirnov distance {distance:.4f}"
    centred, lag = y - 0.5, 1
    while lag <= n // 2:
        r = 12 * float((centred[lag:] * centred[:-lag]).sum()) / math.sqrt(n - lag)
        if abs(r) > SIGMAS + 2:
            return f"elements {lag} apart are correlated"
        lag *= 2
    bits = 24 if x.dtype is torch.float64 else 16
    coarse = float(((y * 2.0**bits) % 1.0 == 0).to(torch.float64).mean())
    if coarse > 0.5:
        return f"too coarse: samples are multiples of 2^-{bits}"
    return None
