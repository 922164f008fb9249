# parts: total
"""One pass over rows that fit the registers (one softmax is enough along the classes), then one small sum.

dim=0 first takes the log-sum-exp of every column; the rows subtract it as they load.
"""

import torch
import triton
import triton.language as tl


@triton.jit
def _columns(x, lse, B, C, xb, xc, BB: tl.constexpr, BC: tl.constexpr):
    """Online log-sum-exp of BC columns."""
    c = tl.program_id(0) * BC + tl.arange(0, BC)
    top = tl.full((BB, BC), -1e38, tl.float32)
    total = tl.zeros((BB, BC), tl.float32)
    for b0 in range(0, B, BB):
        b = (b0 + tl.arange(0, BB)).to(tl.int64)
        inside = (b < B)[:, None] & (c < C)[None, :]
        v = tl.load(x + b[:, None] * xb + c[None, :] * xc, mask=inside, other=float("-inf"))
        new = tl.maximum(top, v)
        total = total * tl.exp(top - new) + tl.exp(v - new)
        top = new
    most = tl.max(top, 0)
    total = tl.sum(total * tl.exp(top - most[None, :]), 0)
    tl.store(lse + c, most + tl.log(total), mask=c < C)


@triton.jit
def _load(x, c, C, xc, shift, SHIFTED: tl.constexpr):
    v = tl.load(x[:, None] + (c * xc)[None, :], mask=(c < C)[None, :], other=float("-inf"))
    if SHIFTED:
        v -= tl.load(shift + c, mask=c < C, other=0.0)[None, :]
    return v


@triton.jit
def _smooth(v, top, lse, c, C, weight, WEIGHTED: tl.constexpr):
    """Sum over the classes of w * -p."""
    p = tl.where((c < C)[None, :], (top[:, None] - v) + lse[:, None], 0.0)
    if WEIGHTED:
        p *= tl.load(weight + c, mask=c < C, other=0.0)[None, :]
    return tl.sum(p, 1)


@triton.jit
def _rows(
    x, target, weight, shift, loss, share, B, C, xb, xc, ts, ignored, certain, spread, WEIGHTED: tl.constexpr,
    SHIFTED: tl.constexpr, SMOOTH: tl.constexpr, EACH: tl.constexpr, WHOLE: tl.constexpr, BB: tl.constexpr,
    BC: tl.constexpr,
):  # fmt: skip
    """Costs of BB rows (EACH), or their sum and that of their weights."""
    b = tl.program_id(0).to(tl.int64) * BB + tl.arange(0, BB)
    x += tl.minimum(b, B - 1) * xb
    smooth = tl.zeros((BB,), tl.float32)
    c = tl.arange(0, BC)
    if WHOLE:
        v = _load(x, c, C, xc, shift, SHIFTED)
        top = tl.max(v, 1)
        lse = tl.log(tl.sum(tl.exp(v - top[:, None]), 1))
        if SMOOTH:
            smooth = _smooth(v, top, lse, c, C, weight, WEIGHTED)
    else:
        top = tl.full((BB,), -1e38, tl.float32)
        sums = tl.zeros((BB,), tl.float32)
        for c0 in range(0, C, BC):
            v = _load(x, c0 + c, C, xc, shift, SHIFTED)
            new = tl.maximum(top, tl.max(v, 1))
            sums = sums * tl.exp(top - new) + tl.sum(tl.exp(v - new[:, None]), 1)
            top = new
        lse = tl.log(sums)
        if SMOOTH:
            for c0 in range(0, C, BC):
                v = _load(x, c0 + c, C, xc, shift, SHIFTED)
                smooth += _smooth(v, top, lse, c0 + c, C, weight, WEIGHTED)
    t = tl.load(target + b * ts, mask=b < B, other=ignored)
    counted = (b < B) & (t != ignored)
    t = tl.where(counted, t, 0)
    picked = tl.load(x + t * xc, mask=counted, other=0.0)
    if SHIFTED:
        picked -= tl.load(shift + t, mask=counted, other=0.0)
    w = tl.where(counted, 1.0, 0.0)
    if WEIGHTED:
        w = tl.load(weight + t, mask=counted, other=0.0)
    cost = tl.where(counted, certain * w * ((top - picked) + lse) + spread * smooth, 0.0)
    if EACH:
        tl.store(loss + b, cost, mask=b < B)
    else:
        tl.store(loss + tl.program_id(0), tl.sum(cost, 0))
        tl.store(share + tl.program_id(0), tl.sum(w, 0))


# For small tensors: compiled once for all sizes and strides, the other once more for every kind of them.
_columns_any = triton.jit(_columns.fn, do_not_specialize=[p.name for p in _columns.params if not p.is_constexpr])
_rows_any = triton.jit(_rows.fn, do_not_specialize=[p.name for p in _rows.params if not p.is_constexpr])


def fused_cross_entropy_log_softmax(
    input, target, dim=1, weight=None, ignore_index=-100, reduction="mean", label_smoothing=0.0
):
    x = input
    B, C = x.shape
    each, columns = reduction == "none", dim in (0, -2)
    BC = min(8192, triton.next_power_of_2(C))
    whole, few = BC >= C, x.numel() < 1 << 17
    if few:
        whole, BC = False, 256
    BB = max(1, 4096 // BC)
    columnwise, rowwise = (_columns_any, _rows_any) if few else (_columns, _rows)
    programs = triton.cdiv(B, BB)
    loss = torch.empty((B if each else programs,), dtype=x.dtype, device=x.device)
    share = torch.empty((programs,), dtype=x.dtype, device=x.device)
    if B:
        shift = x
        if columns:
            shift = torch.empty((C,), dtype=x.dtype, device=x.device)
            columnwise[(triton.cdiv(C, 32),)](x, shift, B, C, *x.stride(), BB=64, BC=32, num_warps=8)
        rowwise[(programs,)](
            x, target, x if weight is None else weight.contiguous(), shift, loss, share, B, C, *x.stride(),
            target.stride(0), ignore_index, 1.0 - label_smoothing, label_smoothing / C, WEIGHTED=weight is not None,
            SHIFTED=columns, SMOOTH=label_smoothing > 0, EACH=each, WHOLE=whole, BB=BB, BC=BC, num_warps=8,
        )  # fmt: skip
    return loss if each else total(loss, share if reduction == "mean" else None)
