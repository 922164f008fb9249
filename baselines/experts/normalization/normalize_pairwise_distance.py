# parts: reduce
"""Distances, their norms, a division. MODE: the power (0: any, given as s), plus 10 for the norm of the distances."""

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice


@triton.jit
def value(v, w, i, inside, s, t, MODE: tl.constexpr):
    d = v if MODE >= 10 else tl.abs(v - w)
    if MODE % 10 == 2:
        d = d * d
    elif MODE % 10 == 0:
        d = libdevice.pow(d, tl.full(d.shape, s, tl.float32))
    return (tl.where(inside, d, 0.0),)


@triton.jit
def combine(a, b):
    return a + b


@triton.jit
def finish(state, n, s, t, MODE: tl.constexpr):
    y = state[0]
    if MODE % 10 == 2:
        y = tl.sqrt_rn(y)
    elif MODE % 10 == 0:
        y = libdevice.pow(y, tl.full(y.shape, 1.0 / s, tl.float32))
    return (tl.maximum(y, t) if MODE >= 10 else y + t,)


@triton.jit
def _divide(d, norm, y, total, n, inner, BLOCK: tl.constexpr):
    """Y = d / norm, the norm of (outer, inner) for d of (outer, n, inner)."""
    e = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    at = e // inner // n * inner + e % inner
    v = tl.load(d + e, mask=e < total)
    tl.store(y + e, v / tl.load(norm + at, mask=e < total, other=1.0), mask=e < total)


# For small tensors: compiled once for all sizes and strides, the other once more for every kind of them.
_divide_any = triton.jit(_divide.fn, do_not_specialize=[p.name for p in _divide.params if not p.is_constexpr])


def normalize_pairwise_distance(
    x1, x2, p_distance=2.0, eps_distance=1e-6, keepdim=False, p_norm=2, dim_norm=1, eps_norm=1e-12
):
    f = (torch.float32,)
    few = x1.numel() < 1 << 17
    mode = int(p_distance) if p_distance in (1, 2) else 0
    d = reduce(
        x1, -1, w=x2, states=f, dtypes=f, keepdim=keepdim, s=float(p_distance), t=float(eps_distance), mode=mode
    )[0]
    y = torch.empty(d.shape, dtype=d.dtype, device=d.device)
    if y.numel():
        mode = 10 + (p_norm if p_norm in (1, 2) else 0)
        norm = reduce(d, dim_norm, states=f, dtypes=f, s=float(p_norm), t=float(eps_norm), mode=mode, few=few)[0]
        total = y.numel()
        kernel = _divide_any if few else _divide
        kernel[(triton.cdiv(total, 1024),)](d, norm, y, total, d.shape[dim_norm], d.stride(dim_norm), BLOCK=1024)
    return y
