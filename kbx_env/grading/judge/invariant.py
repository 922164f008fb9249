"""What a factorisation promises, whatever its signs: reconstruction, orthogonality, ordering."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from kbx_env.errors import DeclarationError
from kbx_env.grading.judge.ruling import PASSED, Answer, Ruling
from kbx_env.grading.reference import Expected
from kbx_env.task import Case
from kbx_env.truth import Invariant

SLACK = 16.0
"""Allowed error in units of eps * max(m, n) * largest singular value (orthogonality: without the last factor).
LAPACK stays below 1; a one-sided Jacobi below 4; TF32 or bf16 products are off by hundreds."""


def _svd(case: Case, args: Mapping[str, Any], expected: Expected, answer: Answer) -> Ruling:
    a = args["A"].to(torch.float64)
    u, s, vh = (x.to("cpu", torch.float64) for x in answer.outputs)
    if not all(bool(torch.isfinite(x).all()) for x in (u, s, vh)):
        return Ruling(False, "the factors hold NaN or infinity")
    eps = torch.finfo(answer.outputs[0].dtype).eps
    bound = SLACK * eps * max(a.shape[-2:])
    k = s.shape[-1]
    if k == 0 or a.numel() == 0:
        return PASSED
    top = expected.outputs[1].to("cpu").amax(-1).clamp_min(torch.finfo(torch.float32).tiny)

    def worst(x: torch.Tensor, scale: torch.Tensor | float = 1.0) -> float:
        return float((x.abs().amax((-2, -1)) / scale).max()) if x.numel() else 0.0

    def eye(n: int) -> torch.Tensor:
        return torch.eye(n, dtype=torch.float64)

    checks = {
        "A = U diag(S) Vh": worst(u[..., :k] * s[..., None, :] @ vh[..., :k, :] - a, top),
        "U has orthonormal columns": worst(u.mT @ u - eye(u.shape[-1])),
        "Vh has orthonormal rows": worst(vh @ vh.mT - eye(vh.shape[-2])),
        "S holds the singular values": worst((s - expected.outputs[1].to("cpu"))[..., None], top),
        "S is not negative": worst(s.clamp_max(0.0)[..., None], top),
        "S descends": worst((s[..., 1:] - s[..., :-1]).clamp_min(0.0)[..., None], top) if k > 1 else 0.0,
    }
    for name, error in checks.items():
        if error > (0.0 if name in ("S is not negative", "S descends") else bound):
            return Ruling(False, f"broken promise: {name} (off by {error / bound:.3g} times the tolerance)", error / bound)
    return PASSED


KINDS: Mapping[str, Callable[[Case, Mapping[str, Any], Expected, Answer], Ruling]] = {"svd": _svd}


def rule(truth: Invariant, case: Case, args: Mapping[str, Any], expected: Expected, answer: Answer) -> Ruling:
    """Check the promises of ``truth.kind``."""
    if truth.kind not in KINDS:
        raise DeclarationError(f"unknown invariant {truth.kind!r}; accepted: {', '.join(KINDS)}")
    return KINDS[truth.kind](case, args, expected, answer)
