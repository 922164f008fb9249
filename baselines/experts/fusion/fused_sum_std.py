# parts: reduce
"""Sums over the axes, then their spread by one program, which reads the few sums twice."""

import torch
import triton
import triton.language as tl


@triton.jit
def value(v, w, i, inside, s, t, MODE: tl.constexpr):
    return (tl.where(inside, v, 0).to(tl.float64 if MODE else tl.float32),)


@triton.jit
def combine(a, b):
    return a + b


@triton.jit
def finish(state, n, s, t, MODE: tl.constexpr):
    return state


@triton.jit
def _spread(sums, y, m, correction, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    kind = sums.dtype.element_ty
    total = tl.zeros((BLOCK,), kind)
    for i0 in range(0, m, BLOCK):
        total += tl.load(sums + i0 + i, mask=i0 + i < m, other=0.0)
    mean = tl.sum(total, 0) / m
    squares = tl.zeros((BLOCK,), kind)
    for i0 in range(0, m, BLOCK):
        d = tl.where(i0 + i < m, tl.load(sums + i0 + i, mask=i0 + i < m, other=0.0) - mean, 0.0)
        squares += d * d
    tl.store(y, tl.sqrt(tl.sum(squares, 0) / (m - correction)))


# For small tensors: compiled once for all sizes and strides, the other once more for every kind of them.
_spread_any = triton.jit(_spread.fn, do_not_specialize=[p.name for p in _spread.params if not p.is_constexpr])


def fused_sum_std(input, dim=None, keepdim=False, dtype=None, correction=1, out=None):
    dtype = dtype or input.dtype
    (sums,) = reduce(input, dim, states=(dtype,), dtypes=(dtype,), mode=int(dtype == torch.float64))
    y = torch.empty((), dtype=dtype, device=input.device) if out is None else out
    m = sums.numel()
    few = input.numel() < 1 << 17
    BLOCK = 1024 if few else min(8192, triton.next_power_of_2(m))
    kernel = _spread_any if few else _spread
    kernel[(1,)](sums, y, m, correction, BLOCK=BLOCK, num_warps=16 if BLOCK == 8192 else 4)
    return y
