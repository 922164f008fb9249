"""References of the paper that compute something else than the task's contract, used by ``grading="paper"`` alone.

``differs`` of each task says in words what differs. References that are not here compute what the task's own reference does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F

Tensor = torch.Tensor


def _returned(result: Tensor, out: Tensor | None) -> Tensor:
    return result if out is None else out.copy_(result)


def _half_gelu(x: Tensor, approximate: str) -> Tensor:
    """The published GELU: its exact branch lacks the + 1 inside the bracket."""
    if approximate == "tanh":
        return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    return x * torch.erf(x / math.sqrt(2)) / 2


def factors(a: Tensor, pivot: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return P, L, U of a = P L U; without pivoting, which torch offers on GPUs only, P is empty."""
    if pivot:
        p, lower, upper = torch.linalg.lu(a)
        return p, lower, upper
    rows, columns = a.shape[-2:]
    k = min(rows, columns)
    x = a.clone()
    for j in range(k):
        x[..., j + 1 :, j] /= x[..., j, j, None]
        x[..., j + 1 :, j + 1 :] -= x[..., j + 1 :, j, None] * x[..., j, None, j + 1 :]
    lower = x.tril(-1)[..., :k] + torch.eye(rows, k, dtype=a.dtype, device=a.device)
    return a.new_empty((0,)), lower, x.triu()[..., :k, :]


def _selu(input, inplace=False):
    low = 1.6732632423543772 * (input.exp() - 1)
    return 1.0507009873554805 * (input.maximum(torch.zeros_like(input)) + input.minimum(low))


def _gelu_int8(input, approximate="none"):
    return F.gelu(input.float(), approximate=approximate).to(torch.int8)


def _cosine_loss(input1, input2, target, margin=0, reduction="mean"):
    cosine = (F.normalize(input1, dim=1) * F.normalize(input2, dim=1)).sum(1)
    loss = (1 - cosine * target.float()).clamp(min=0)
    if margin > 0:
        loss = loss.maximum(margin - cosine)
    return loss.mean() if reduction == "mean" else loss.sum() if reduction == "sum" else loss


def _gelu_min(input, approximate="none", dim=None, keepdim=False, out=None):
    y = _half_gelu(input, approximate)
    return y.min() if dim is None else tuple(y.min(dim=dim, keepdim=keepdim))


def _min_gelu(input, dim=None, keepdim=False, approximate="none", out=None):
    return _gelu_min(input, approximate, dim, keepdim)


def _sub_gelu(input, other, alpha=1, approximate="none", out=None):
    return _returned(_half_gelu(input - alpha * other, approximate), out)


def _distance_pool(x1, x2, output_size, p=2.0, eps=1e-6, keepdim=False):
    apart = F.adaptive_avg_pool2d(x1, output_size) - F.adaptive_avg_pool2d(x2, output_size)
    return torch.norm(apart, p=p, dim=(1, 2, 3), keepdim=keepdim) + eps


def _distance_normalize(x1, x2, p_norm=2.0, eps_norm=1e-12, eps_distance=1e-6, keepdim=False):
    a, b = (x / torch.norm(x, p=p_norm, dim=-1, keepdim=True).clamp_min(eps_norm) for x in (x1, x2))
    apart = torch.norm(a.unsqueeze(1) - b.unsqueeze(0), p=p_norm, dim=-1).clamp_min(eps_distance)
    return apart.unsqueeze(-1) if keepdim else apart


def _sum_std(input, dim=None, keepdim=False, dtype=None, correction=1, out=None):
    sums = input.sum(dim=dim, keepdim=keepdim, dtype=dtype)
    if sums.numel() <= correction:
        return torch.tensor(0.0, dtype=sums.dtype)
    return (((sums - sums.mean()) ** 2).sum() / (sums.numel() - correction)).sqrt()


def _tile_exp(input, dims, *, out=None):
    result = torch.exp(input.unsqueeze(0).expand(*dims, *input.shape))
    if out is not None:
        out.copy_(result)
    return result


def _signbit_and(input, other):
    return torch.signbit(input), input.to(torch.int8) & other.to(torch.int8)


def _binomial(input, other, total_count, probs=None, logits=None):
    chance = torch.sigmoid(logits) if probs is None else probs
    return torch.distributions.Binomial(total_count=total_count, probs=chance).sample()


def _bmm_norm_sub(
    input1, input2, other, normalized_shape, dropout_p=0.5, training=True, approximate="none", eps=1e-5, *, out=None
):  # fmt: skip
    z = F.rms_norm(torch.bmm(input1, input2), (normalized_shape,), eps=eps)
    return _returned(F.dropout(F.gelu(z, approximate=approximate), p=dropout_p, training=training), out)


def _cholesky_solve(A, b):
    lower = torch.linalg.cholesky(A)
    return torch.linalg.solve(lower.mT, torch.linalg.solve(lower, b))


def _lu_solve(A, b):
    _, lower, upper = torch.linalg.lu(A)
    return torch.linalg.solve(lower @ upper, b)


def _solve_ldl(A, b, hermitian=False, out=None):
    kind = torch.complex64 if hermitian and A.is_complex() else torch.float32
    lower, pivots = torch.linalg.ldl_factor(A.to(kind), hermitian=hermitian)
    middle = torch.diag_embed(pivots.to(lower.dtype))
    return _returned(torch.linalg.solve(lower @ middle @ (lower.mH if hermitian else lower.mT), b.to(kind)), out)


def _matrix_power(A, k, *, out=None):
    w, q = torch.linalg.eigh(A)
    return _returned(q @ (torch.diag(w.pow(k)) @ q.mT), out)


def _determinant_lu(A, *, pivot=True, out=None):
    p, _, upper = factors(A, pivot)
    det = upper.diagonal(dim1=-2, dim2=-1).prod(-1)
    return _returned(torch.linalg.slogdet(p)[0] * det if pivot else det, out)


def _invert_lu(A, *, pivot=True, out=None):
    p, lower, upper = factors(A, pivot)
    right = p if pivot else torch.eye(A.shape[-1], device=A.device, dtype=A.dtype)
    return _returned(torch.linalg.solve(upper, torch.linalg.solve(lower, right)), out)


def _pseudoinverse(A, full_matrices=True, rcond=1e-15, out=None):
    u, s, vh = torch.linalg.svd(A, full_matrices=full_matrices)
    inverse = torch.where(s > rcond * s.amax(-1, keepdim=True), 1 / s, torch.zeros_like(s))
    return _returned(vh.mH @ torch.diag_embed(inverse) @ u.mH, out)


def _log_tanh(input, out=None):
    if torch.any(input <= 0):
        raise ValueError("All input elements must be positive for the logarithm function to be defined.")
    return _returned(torch.tanh(torch.log(input)), out)


def _cross_entropy_norm(
    logits, targets, normalized_shape, weight=None, ignore_index=-100, reduction="mean", label_smoothing=0.0, eps=1e-5, *,
    out=None,
):  # fmt: skip
    more = {"weight": weight, "ignore_index": ignore_index, "reduction": reduction, "label_smoothing": label_smoothing}
    y = F.layer_norm(F.softmax(logits, dim=-1), (normalized_shape,), eps=eps)
    return F.cross_entropy(logits, targets, **more), _returned(y, out)


def _log_softmax_linear(input, weight, bias=None, dim=-1, dtype=None):
    z = torch.matmul(input, weight.mT)
    return F.log_softmax(z if bias is None else z + bias, dim=dim, dtype=dtype)


def _airy(input, out=None):
    return torch.special.airy_ai(input)


def _rand(
    size,
    *,
    generator=None,
    out=None,
    dtype=None,
    layout=torch.strided,
    device=None,
    requires_grad=False,
    pin_memory=False,
):
    return torch.rand(*size, generator=generator, dtype=dtype, device=device, requires_grad=requires_grad)


def _logspace(start, end, steps, base=10.0, dtype=None, layout=torch.strided, device=None, requires_grad=False):
    return torch.logspace(start, end, steps, base, dtype=dtype, device=device, requires_grad=requires_grad)


def _adam(params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0):
    """The published result is ``torch.optim.Adam(...).defaults``, which is no tensor; ``unpassable`` says so."""
    return torch.zeros(())


def _attention(query, key, value):
    scores = torch.matmul(query, key.mT) / math.sqrt(query.shape[-1])
    return torch.matmul(F.softmax(scores, dim=-1), value)


def _conv2d(input, weight, bias=None, stride=1, padding=0):
    return F.conv2d(input, weight, bias, stride, padding)


def _layer_norm(input, normalized_shape, weight=None, bias=None, eps=1e-5):
    shape = normalized_shape if isinstance(normalized_shape, tuple | list) else (normalized_shape,)
    return F.layer_norm(input, tuple(shape), weight, bias, eps)


def _linear(input, weight, bias=None):
    return F.linear(input, weight, bias)


def _matmul(input, weight):
    return torch.matmul(input, weight)


def _bmm(input, mat2):
    return torch.bmm(input, mat2)


REFERENCES: Mapping[str, Callable[..., Any]] = {
    "activation/gelu_int8": _gelu_int8,
    "activation/selu": _selu,
    "fusion/fused_bmm_rmsnorm_gelu_dropout_sub": _bmm_norm_sub,
    "fusion/fused_cholesky_solve": _cholesky_solve,
    "fusion/fused_cosine_embedding_loss_with_normalization": _cosine_loss,
    "fusion/fused_cross_entropy_softmax_layernorm": _cross_entropy_norm,
    "fusion/fused_gelu_min": _gelu_min,
    "fusion/fused_log_softmax_linear": _log_softmax_linear,
    "fusion/fused_log_tanh": _log_tanh,
    "fusion/fused_lu_solve": _lu_solve,
    "fusion/fused_pairwise_distance_adaptive_avg_pool2d": _distance_pool,
    "fusion/fused_pairwise_distance_normalize": _distance_normalize,
    "fusion/fused_sub_gelu": _sub_gelu,
    "fusion/fused_sum_std": _sum_std,
    "fusion/fused_tile_exp": _tile_exp,
    "linearalgebra/determinant_lu": _determinant_lu,
    "linearalgebra/invert_matrix_lu": _invert_lu,
    "linearalgebra/matrix_power_eig": _matrix_power,
    "linearalgebra/pseudoinverse_svd": _pseudoinverse,
    "linearalgebra/solve_symmetric_ldl": _solve_ldl,
    "math/airy_ai": _airy,
    "math/bitwise_and_binomial": _binomial,
    "math/signbit_bitwise_and": _signbit_and,
    "optimizer/Adam": _adam,
    "quantization/attention_w8a8": _attention,
    "quantization/bmm_w8a8": _bmm,
    "quantization/conv2d_w8a8": _conv2d,
    "quantization/layernorm_w8a8": _layer_norm,
    "quantization/linear_w4a16": _linear,
    "quantization/matmul_w8a8": _matmul,
    "random/logspace": _logspace,
    "random/rand": _rand,
    "reduce/min_gelu": _min_gelu,
}
"""Published reference by task."""
