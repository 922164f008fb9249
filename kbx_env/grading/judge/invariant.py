"""Judges factorisations by their properties, which hold for any choice of signs: reconstruction, orthogonality,
ordering.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from kbx_env.errors import DeclarationError
from kbx_env.grading.judge.ruling import PASSED, Answer, Ruling
from kbx_env.grading.reference import Expected
from kbx_env.spec.criteria import Invariant

SLACK = 16.0
"""Allowed error in units of eps * max(m, n) (times the largest singular value where that is the scale), as the task
publishes it. Measured in units of eps * sqrt(max(m, n)), 3x3 to 512x512: LAPACK and a one-sided Jacobi stay below 2.3,
factors rounded to TF32 lie at 1800 (3x3), 400 (40x24), 112 (128x128) and 42 (512x512)."""
K = 4.0
"""Allowed error as a multiple of LAPACK's own error on the same matrix, if that is larger (up to ``K`` times the other
limit)."""


def _svd_errors(a: torch.Tensor, exact_s: torch.Tensor, factors: tuple[torch.Tensor, ...]) -> dict[str, float]:
    """Return the error of each property of an SVD, relative to 1 or to the largest singular value.

    Args:
        a: the matrices, ``(..., m, n)``, fp64.
        exact_s: exact singular values, ``(..., min(m, n))``, fp64, descending.
        factors: U, S and Vh.

    Returns:
        The largest error over all matrices, by property.
    """
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


def _eye(n: int, like: torch.Tensor) -> torch.Tensor:
    """Return the n x n identity with the dtype and device of a tensor."""
    return torch.eye(n, dtype=like.dtype, device=like.device)


def _worst(x: torch.Tensor, scale: torch.Tensor | float = 1.0) -> float:
    """Return the largest absolute element over all matrices, each divided by its scale; 0 without elements."""
    return float((x.abs().amax((-2, -1)) / scale).max()) if x.numel() else 0.0


def _size(a: torch.Tensor) -> torch.Tensor | float:
    """Return the scale of each matrix: its largest absolute element times the square root of its columns."""
    return a.abs().amax((-2, -1)).clamp_min(1e-300) * math.sqrt(a.shape[-1]) if a.numel() else 1.0


def _svd(a: torch.Tensor, expected: Expected, factors: Factors) -> dict[str, float]:
    """Return the errors of U, S and Vh, by property."""
    return _svd_errors(a, expected.outputs[1].to(torch.float64), factors)


def _qr(a: torch.Tensor, expected: Expected, factors: Factors) -> dict[str, float]:
    """Return the errors of Q and R, by property; mode ``r`` of torch returns an empty Q."""
    q, r = factors
    found = {"R is upper triangular": _worst(r.tril(-1)) * STRICT}
    if q.numel() == 0 and a.numel():
        gram = a.mH @ a
        return found | {"R^T R = A^T A": _worst(r.mH @ r - gram, _size(gram))}
    return found | {
        "A = Q R": _worst(q @ r - a, _size(a)),
        "Q has orthonormal columns": _worst(q.mH @ q - _eye(q.shape[-1], q)),
    }


def _lu(a: torch.Tensor, expected: Expected, factors: Factors) -> dict[str, float]:
    """Return the errors of P, L and U, by property; without pivoting P is empty."""
    p, lower, upper = factors
    k = lower.shape[-1]
    found = {
        "L is unit lower triangular": (_worst(lower.triu(1)) + _worst(lower.diagonal(0, -2, -1)[..., None] - 1))
        * STRICT,
        "U is upper triangular": _worst(upper.tril(-1)) * STRICT,
    }
    product = lower @ upper
    if p.numel():
        valid = ((p == 0) | (p == 1)).all() and (p.sum(-1) == 1).all() and (p.sum(-2) == 1).all()
        found["P is a permutation"] = 0.0 if bool(valid) else math.inf
        found["no element of L is larger than 1"] = max(0.0, _worst(lower) - 1.0) if k else 0.0
        product = p @ product
    return found | {"A = P L U": _worst(product - a, _size(a))}


def _eig(a: torch.Tensor, expected: Expected, factors: Factors) -> dict[str, float]:
    """Return the errors of the eigenvalues w and eigenvectors V, by property."""
    w, v = factors
    a = a.to(v.dtype)
    norms = torch.linalg.vector_norm(v, dim=-2, keepdim=True)
    found = {
        "A V = V diag(w)": _worst(a @ v - v * w[..., None, :], _size(a)),
        "the eigenvectors have length 1": _worst(norms - 1),
    }
    if v.numel():
        # n copies of one pair would satisfy both: the smallest singular value of V must be at least 1/4 of the true
        # one's.
        true = torch.linalg.svdvals(expected.outputs[1].to(v.dtype))[..., -1]
        found["the eigenvectors are independent"] = (
            float((torch.linalg.svdvals(v)[..., -1] < 0.25 * true).any()) * STRICT
        )
    return found


def _valid_pivots(pivots: torch.Tensor) -> bool:
    """Return whether pivots have LAPACK's form: in range, the two of a 2x2 block equal and negative."""
    for row in pivots.reshape(-1, pivots.shape[-1]).tolist():
        k, n = 0, len(row)
        while k < n:
            if not 1 <= abs(row[k]) <= n or (row[k] < 0 and (k + 1 == n or row[k + 1] != row[k])):
                return False
            k += 1 if row[k] > 0 else 2
    return True


def _ldl(a: torch.Tensor, expected: Expected, factors: Factors, hermitian: bool) -> dict[str, float]:
    """Return the error of the inverse by the packed LD and the pivots."""
    packed, pivots = factors
    if not a.numel():
        return {}
    if not _valid_pivots(pivots):
        return {"the pivots follow LAPACK's form": math.inf}
    x = torch.linalg.ldl_solve(
        packed, pivots.to(torch.int32), _eye(a.shape[-1], a).expand(a.shape), hermitian=hermitian
    )
    return {"LD and pivots solve A X = 1": _worst(a @ x - _eye(a.shape[-1], a), _size(a) * _size(x))}


Factors = tuple[torch.Tensor, ...]
STRICT = 1e300
"""Factor of errors that must be exactly 0: zeros of a triangle, ones on a diagonal."""
KINDS: Mapping[str, Callable[..., dict[str, float]]] = {"svd": _svd, "qr": _qr, "lu": _lu, "eig": _eig, "ldl": _ldl}
"""By ``Invariant.kind``: the function that returns the errors by property."""
_EXACT = ("S is not negative", "S descends")
"""Properties that must hold without any error."""


def _wide(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor on the CPU in fp64 or complex128; integers keep their dtype."""
    if not (x.is_floating_point() or x.is_complex()):
        return x.to("cpu")
    return x.resolve_conj().to("cpu", torch.complex128 if x.is_complex() else torch.float64)


def errors_and_limits(
    truth: Invariant, args: Mapping[str, Any], expected: Expected, answer: Answer
) -> dict[str, tuple[float, float]]:  # fmt: skip
    """Measure the properties of ``truth.kind``.

    Args:
        truth: the kind of factorisation.
        args: the arguments of the call; the first tensor with two axes or more is factorised.
        expected: the reference's answers.
        answer: the answer to judge, all finite.

    Returns:
        The error of each property, and the largest error allowed.

    Raises:
        DeclarationError: no such kind.
    """

    def errors(factors: tuple[torch.Tensor, ...]) -> dict[str, float]:
        return _errors(truth, args, expected, factors)

    base, own, found = _base(args, answer), errors(expected.native), errors(answer.outputs)
    # K * base limits the allowance: where the case itself violates the property, LAPACK's error is arbitrarily large.
    limits = {name: 0.0 if name in _EXACT else max(base, min(K * own.get(name, 0.0), K * base)) for name in found}
    return {name: (error, limits[name]) for name, error in found.items()}


def _matrix(args: Mapping[str, Any]) -> torch.Tensor:
    """Return the argument that is factorised, in ``_wide``."""
    return _wide(next(v for v in args.values() if isinstance(v, torch.Tensor) and v.dim() >= 2))


def _base(args: Mapping[str, Any], answer: Answer) -> float:
    """Return the error that is allowed whatever LAPACK's own is."""
    return SLACK * torch.finfo(answer.outputs[0].dtype).eps * max(1, *_matrix(args).shape[-2:])


def _errors(
    truth: Invariant, args: Mapping[str, Any], expected: Expected, factors: tuple[torch.Tensor, ...]
) -> dict[str, float]:  # fmt: skip
    """Return the error of each property of ``truth.kind``."""
    if truth.kind not in KINDS:
        raise DeclarationError(f"unknown invariant {truth.kind!r}; accepted: {', '.join(KINDS)}")
    more = {"hermitian": bool(args.get("hermitian", False))} if truth.kind == "ldl" else {}
    on_cpu = replace(expected, outputs=tuple(_wide(o) for o in expected.outputs))
    return KINDS[truth.kind](_matrix(args), on_cpu, tuple(_wide(o) for o in factors), **more)


def meets_declared(truth: Invariant, args: Mapping[str, Any], expected: Expected, answer: Answer) -> bool:
    """Return whether ``rule`` passes an answer whatever LAPACK's own error is.

    Args:
        truth: the kind of factorisation.
        args: the arguments of the call.
        expected: from ``reference.exact_answer``.
        answer: an answer that ``structure.rule`` has passed.

    Returns:
        False also where a factor holds NaN or infinity.
    """
    if not all(bool(torch.isfinite(x).all()) for x in answer.outputs):
        return False
    base = _base(args, answer)
    return all(e <= (0.0 if name in _EXACT else base) for name, e in _errors(truth, args, expected, answer.outputs).items())


def rule(truth: Invariant, args: Mapping[str, Any], expected: Expected, answer: Answer) -> Ruling:
    """Check the properties of ``truth.kind``.

    Args:
        truth: the kind of factorisation.
        args: the arguments of the call; the first tensor with two axes or more is factorised.
        expected: the reference's answers.
        answer: the answer to judge.

    Returns:
        The ruling, with the error of the first property that does not hold.
    """
    if not all(bool(torch.isfinite(x).all()) for x in answer.outputs):
        return Ruling(False, "the factors hold NaN or infinity")
    for name, (error, limit) in errors_and_limits(truth, args, expected, answer).items():
        if not error <= limit:
            return Ruling(False, f"broken promise: {name} (error {error:.2g}, allowed {limit:.2g})", error, limit)
    return PASSED
