"""Softmax: slices that fit a program are read once, longer ones twice (online maximum and sum)."""

import torch
import triton
import triton.language as tl


@triton.jit
def _softmax(x, y, n, inner, BN: tl.constexpr, BI: tl.constexpr, ONCE: tl.constexpr):
    """Softmax over the middle axis of (outer, n, inner); a program owns BI neighbouring columns."""
    # One grid axis for both: the second one of CUDA ends at 65535.
    tiles = tl.cdiv(inner, BI)
    i = tl.program_id(0) % tiles * BI + tl.arange(0, BI)
    base = (tl.program_id(0) // tiles).to(tl.int64) * n * inner
    kind = y.dtype.element_ty
    wide = tl.float64 if kind == tl.float64 else tl.float32
    if ONCE:
        r = tl.arange(0, BN)
        inside = (r[:, None] < n) & (i[None, :] < inner)
        where = base + r[:, None].to(tl.int64) * inner + i[None, :]
        v = tl.load(x + where, mask=inside, other=float("-inf")).to(wide)
        top = tl.max(v, 0)
        e = tl.exp(v - tl.where(top == float("-inf"), 0.0, top)[None, :])
        tl.store(y + where, (e / tl.sum(e, 0)[None, :]).to(kind), mask=inside)
    else:
        top = tl.full((BI,), float("-inf"), wide)
        total = tl.zeros((BI,), wide)
        for r0 in range(0, n, BN):
            r = r0 + tl.arange(0, BN)
            inside = (r[:, None] < n) & (i[None, :] < inner)
            where = base + r[:, None].to(tl.int64) * inner + i[None, :]
            v = tl.load(x + where, mask=inside, other=float("-inf")).to(wide)
            new = tl.maximum(top, tl.max(v, 0))
            safe = tl.where(new == float("-inf"), 0.0, new)
            total = total * tl.exp(top - safe) + tl.sum(tl.exp(v - safe[None, :]), 0)
            top = new
        for r0 in range(0, n, BN):
            r = r0 + tl.arange(0, BN)
            inside = (r[:, None] < n) & (i[None, :] < inner)
            where = base + r[:, None].to(tl.int64) * inner + i[None, :]
            v = tl.load(x + where, mask=inside, other=float("-inf")).to(wide)
            tl.store(y + where, (tl.exp(v - top[None, :]) / total[None, :]).to(kind), mask=inside)


def softmax(input, dim, dtype=None):
    """Works on a contiguous (outer, n, inner) view."""
    x = input.contiguous()
    dim %= x.dim()
    outer = inner = 1
    for size in x.shape[:dim]:
        outer *= size
    for size in x.shape[dim + 1 :]:
        inner *= size
    n = x.shape[dim]
    y = torch.empty(x.shape, dtype=dtype or x.dtype, device=x.device)
    if y.numel() == 0:
        return y
    BI = min(32, triton.next_power_of_2(inner))
    BN = min(8192 // BI, triton.next_power_of_2(n))
    grid = (triton.cdiv(inner, BI) * outer,)
    _softmax[grid](x, y, n, inner, BN=BN, BI=BI, ONCE=n <= BN, num_warps=8 if BN * BI > 2048 else 4)
    return y
