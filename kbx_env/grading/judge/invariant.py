"""What a factorisation promises, whatever its signs: reconstruction, orthogonality, ordering."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from kbx_env.errors import DeclarationError
from kbx_env.grading.judge.ruling import PASSED, Answer, Ruling
from kbx_env.grading.reference import Expected
from kbx_env.truth import Invariant

SLACK = 16.0
"""Allowed error in units of eps * max(m, n) (times the largest singular value where that is the scale), as the task
publishes it. Measured in units of eps * sqrt(max(m, n)), 3x3 to 512x512: LAPACK and a one-sided Jacobi stay below 2.3,
factors rounded to TF32 lie at 1800 (3x3), 400 (40x24), 112 (128x128) and 42 (512x512)."""
K = 4.0
"""Or this many times the error that LAPACK itself makes on the same matrix."""


def _svd_errors(a: torch.Tensor, exact_s: torch.Tensor, factors: tuple[torch.Tensor, ...]) -> dict[str, float]:
    """How far each promise is broken, relative to 1 or to the largest singular value."""
    u, s, vh = (x.to(a.device, torch.float64) for x in factors)
    k = s.shape[-1]
    top = exact_s.amax(-1).clamp_min(torch.finfo(torch.float32).tiny) if k else torch.ones(())

    def worst(x: torch.Tensor, scale: torch.Tensor | float = 1.0) -> float:
        return float((x.abs().amax((-2, -1)) / scale).max()) if x.numel() else 0.0

    def eye(n: int) -> torch.Tensor:
        return torch.eye(n, dtype=torch.float64, device=a.device)

    return {
        "A = U diag(S) Vh": worst(u[..., :k] * s[..., None, :] @ vh[..., :k, :] - a, top),
        "U has orthonormal columns": worst(u.mT @ u - eye(u.shape[-1])),
        "Vh has orthonormal rows": worst(vh @ vh.mT - eye(vh.shape[-2])),
        "S holds the singular values": worst((s - exact_s)[..., None], top),
        "S is not negative": worst(s.clamp_max(0.0)[..., None], top),
        "S descends": worst((s[..., 1:] - s[..., :-1]).clamp_min(0.0)[..., None], top),
    }


def _svd(args: Mapping[str, Any], expected: Expected, answer: Answer) -> Ruling:
    matrix = next(v for v in args.values() if isinstance(v, torch.Tensor) and v.dim() >= 2)
    a, exact_s = matrix.to("cpu", torch.float64), expected.outputs[1].to("cpu", torch.float64)
    if not all(bool(torch.isfinite(x).all()) for x in answer.outputs):
        return Ruling(False, "the factors hold NaN or infinity")
    base = SLACK * torch.finfo(answer.outputs[0].dtype).eps * max(1, *a.shape[-2:])
    own = _svd_errors(a, exact_s, expected.native)
    for name, error in _svd_errors(a, exact_s, answer.outputs).items():
        limit = 0.0 if name in ("S is not negative", "S descends") else max(base, K * own[name])
        if error > limit:
            return Ruling(False, f"broken promise: {name} (error {error:.2g}, allowed {limit:.2g})", error, limit)
    return PASSED


KINDS: Mapping[str, Callable[[Mapping[str, Any], Expected, Answer], Ruling]] = {"svd": _svd}


def rule(truth: Invariant, args: Mapping[str, Any], expected: Expected, answer: Answer) -> Ruling:
    """Check the promises of ``truth.kind``."""
    if truth.kind not in KINDS:
        raise DeclarationError(f"unknown invariant {truth.kind!r}; accepted: {', '.join(KINDS)}")
    return KINDS[truth.kind](args, expected, answer)
