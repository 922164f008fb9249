# parts: total
"""One pass: a row stays in the registers from its maximum to its normalised softmax; then one small sum of costs."""

import torch
import triton
import triton.language as tl


@triton.jit
def _rows(
    x, targets, weight, y, loss, share, B, C, xb, xc, ts, ignored, certain, spread, eps, WEIGHTED: tl.constexpr,
    SMOOTH: tl.constexpr, EACH: tl.constexpr, BB: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0).to(tl.int64) * BB + tl.arange(0, BB)
    c = tl.arange(0, BC)
    row = x + tl.minimum(b, B - 1) * xb
    real = (c < C)[None, :]
    v = tl.load(row[:, None] + (c * xc)[None, :], mask=real, other=float("-inf"))
    top = tl.max(v, 1)
    e = tl.exp(v - top[:, None])
    total = tl.sum(e, 1)
    lse = tl.log(total)
    p = e / total[:, None]
    d = tl.where(real, p - (tl.sum(p, 1) / C)[:, None], 0.0)
    scale = 1.0 / tl.sqrt(tl.sum(d * d, 1) / C + eps)
    tl.store(y + b[:, None] * C + c[None, :], d * scale[:, None], mask=(b < B)[:, None] & real)
    t = tl.load(targets + b * ts, mask=b < B, other=ignored)
    counted = (b < B) & (t != ignored)
    t = tl.where(counted, t, 0)
    picked = tl.load(row + t * xc, mask=counted, other=0.0)
    w = tl.where(counted, 1.0, 0.0)
    if WEIGHTED:
        w = tl.load(weight + t, mask=counted, other=0.0)
    cost = certain * w * ((top - picked) + lse)
    if SMOOTH:
        q = tl.where(real, (top[:, None] - v) + lse[:, None], 0.0)
        if WEIGHTED:
            q *= tl.load(weight + c, mask=c < C, other=0.0)[None, :]
        cost += spread * tl.sum(q, 1)
    cost = tl.where(counted, cost, 0.0)
    if EACH:
        tl.store(loss + b, cost, mask=b < B)
    else:
        tl.store(loss + tl.program_id(0), tl.sum(cost, 0))
        tl.store(share + tl.program_id(0), tl.sum(w, 0))


# For small tensors: compiled once for all sizes and strides, the other once more for every kind of them.
_rows_any = triton.jit(_rows.fn, do_not_specialize=[p.name for p in _rows.params if not p.is_constexpr])


def fused_cross_entropy_softmax_layernorm(
    logits, targets, normalized_shape, weight=None, ignore_index=-100, reduction="mean", label_smoothing=0.0, eps=1e-5,
    *, out=None,
):  # fmt: skip
    x = logits
    B, C = x.shape
    each = reduction == "none"
    few = x.numel() < 1 << 17
    BC = max(256 if few else 1, triton.next_power_of_2(C))
    BB = max(1, 4096 // BC)
    programs = triton.cdiv(B, BB)
    y = torch.empty((B, C), dtype=x.dtype, device=x.device)
    loss = torch.empty((B if each else programs,), dtype=x.dtype, device=x.device)
    if each and out is not None and out.is_contiguous():
        loss = out
    share = torch.empty((programs,), dtype=x.dtype, device=x.device)
    if B:
        kernel = _rows_any if few else _rows
        kernel[(programs,)](
            x, targets, x if weight is None else weight.contiguous(), y, loss, share, B, C, *x.stride(),
            targets.stride(0), ignore_index, 1.0 - label_smoothing, label_smoothing / C, eps,
            WEIGHTED=weight is not None, SMOOTH=label_smoothing > 0, EACH=each, BB=BB, BC=BC,
            num_warps=8 if BC <= 8192 else 16 if BC <= 32768 else 32,
        )  # fmt: skip
    if not each:
        return total(loss, share if reduction == "mean" else None, out=out), y
    return loss if out is None or out is loss else out.copy_(loss), y
