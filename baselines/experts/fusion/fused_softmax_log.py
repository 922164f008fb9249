"""softmax(log(x)) is x / sum(x): no exponential, no logarithm, no maximum."""

import torch
import triton
import triton.language as tl


@triton.jit
def _shares(x, y, n, inner, BN: tl.constexpr, BI: tl.constexpr, ONCE: tl.constexpr):
    """x / sum(x) over the middle axis of (outer, n, inner); a program owns BI neighbouring columns."""
    tiles = tl.cdiv(inner, BI)
    i = (tl.program_id(0) % tiles * BI + tl.arange(0, BI))[None, :]
    base = (tl.program_id(0) // tiles).to(tl.int64) * n * inner
    kind = y.dtype.element_ty
    r = tl.arange(0, BN)[:, None]
    if ONCE:
        inside = (r < n) & (i < inner)
        at = base + r.to(tl.int64) * inner + i
        v = tl.load(x + at, mask=inside, other=0.0).to(kind)
        tl.store(y + at, v / tl.sum(v, 0)[None, :], mask=inside)
    else:
        total = tl.zeros((BN, BI), kind)
        for r0 in range(0, n, BN):
            at = base + (r0 + r).to(tl.int64) * inner + i
            total += tl.load(x + at, mask=(r0 + r < n) & (i < inner), other=0.0).to(kind)
        # The last tiles are the ones still in the cache: walk back.
        share = 1.0 / tl.sum(total, 0)[None, :]
        last = (n - 1) // BN * BN
        for back in range(0, n, BN):
            r0 = last - back
            inside = (r0 + r < n) & (i < inner)
            at = base + (r0 + r).to(tl.int64) * inner + i
            v = tl.load(x + at, mask=inside, other=0.0).to(kind)
            tl.store(y + at, v * share, mask=inside)


# For small tensors: compiled once for all sizes and strides, the other once more for every kind of them.
_shares_any = triton.jit(_shares.fn, do_not_specialize=[p.name for p in _shares.params if not p.is_constexpr])


def fused_softmax_log(input, dim=-1, dtype=None):
    """Works on a contiguous (outer, n, inner) view."""
    x = input.contiguous()
    y = torch.empty(x.shape, dtype=dtype or x.dtype, device=x.device)
    if y.numel() == 0:
        return y
    dim %= x.dim()
    outer = inner = 1
    for size in x.shape[:dim]:
        outer *= size
    for size in x.shape[dim + 1 :]:
        inner *= size
    n = x.shape[dim]
    BI = min(32, triton.next_power_of_2(inner))
    whole = 16384 if y.element_size() == 4 else 8192
    BN = triton.next_power_of_2(n)
    once = whole >= BN * BI
    if not once:
        BN = 4096 // BI
    kernel = _shares
    if x.numel() < 1 << 17:
        kernel, once = _shares_any, False
        BN, BI = (512, 1) if inner == 1 else (64, 32)
    warps = 4 if BN * BI <= 2048 else 8 if BN * BI <= 8192 else 16
    kernel[(triton.cdiv(inner, BI) * outer,)](x, y, n, inner, BN=BN, BI=BI, ONCE=once, num_warps=warps)
    return y
