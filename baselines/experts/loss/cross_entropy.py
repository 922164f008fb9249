"""Cross entropy: one pass of online log-sum-exp over the classes, then one small reduction."""

import torch
import triton
import triton.language as tl


@triton.jit
def _rows(
    x,
    target,
    weight,
    loss,
    share,
    B,
    C,
    S,
    xb,
    xc,
    xs,
    ignored,
    WEIGHTED: tl.constexpr,
    BS: tl.constexpr,
    BC: tl.constexpr,
):
    """Loss and weight of BS elements (b, s): an online log-sum-exp over the class axis."""
    e = tl.program_id(0).to(tl.int64) * BS + tl.arange(0, BS)
    valid = e < B * S
    base = x + (e // S) * xb + (e % S) * xs
    top = tl.full((BS,), float("-inf"), tl.float32)
    total = tl.zeros((BS,), tl.float32)
    for c0 in range(0, C, BC):
        c = c0 + tl.arange(0, BC)
        v = tl.load(base[:, None] + c[None, :] * xc, mask=valid[:, None] & (c[None, :] < C), other=float("-inf"))
        new = tl.maximum(top, tl.max(v, 1))
        safe = tl.where(new == float("-inf"), 0.0, new)
        total = total * tl.exp(top - safe) + tl.sum(tl.exp(v - safe[:, None]), 1)
        top = new
    t = tl.load(target + e, mask=valid, other=0)
    counted = valid & (t != ignored)
    picked = tl.load(base + tl.where(counted, t, 0) * xc, mask=counted, other=0.0)
    w = tl.where(counted, 1.0, 0.0)
    if WEIGHTED:
        w = tl.load(weight + tl.where(counted, t, 0), mask=counted, other=0.0)
    value = tl.where(counted, w * ((top - picked) + tl.log(total)), 0.0)
    tl.store(loss + e, value, mask=valid)
    tl.store(share + e, w, mask=valid)


@triton.jit
def _reduce(loss, share, out, n, MEAN: tl.constexpr, BLOCK: tl.constexpr):
    total = tl.zeros((BLOCK,), tl.float32)
    weights = tl.zeros((BLOCK,), tl.float32)
    for e0 in range(0, n, BLOCK):
        e = e0 + tl.arange(0, BLOCK)
        total += tl.load(loss + e, mask=e < n, other=0.0)
        weights += tl.load(share + e, mask=e < n, other=0.0)
    result = tl.sum(total, 0)
    if MEAN:
        result = result / tl.sum(weights, 0)
    tl.store(out, result)


# For small tensors: compiled once for all sizes and strides, the other once more for every kind of them.
_rows_any = triton.jit(_rows.fn, do_not_specialize=[p.name for p in _rows.params if not p.is_constexpr])
_reduce_any = triton.jit(_reduce.fn, do_not_specialize=[p.name for p in _reduce.params if not p.is_constexpr])


def cross_entropy(input, target, weight=None, ignore_index=-100, reduction="mean"):
    """Reads the logits once; the mean divides by the summed weights."""
    B, C = input.shape[:2]
    S = 1
    for size in input.shape[2:]:
        S *= size
    x = input if input.dim() == 2 else input.contiguous().view(B, C, S)
    xb, xc, xs = (*x.stride(), 0)[:3]
    loss = torch.empty(target.shape, dtype=input.dtype, device=input.device)
    share = torch.empty(target.shape, dtype=input.dtype, device=input.device)
    n, few = B * S, input.numel() < 1 << 17
    rows, add_up = (_rows_any, _reduce_any) if few else (_rows, _reduce)
    if n:
        BC = min(1024, triton.next_power_of_2(C))
        BS = max(1, 4096 // BC) if BC < 512 else 4
        if few:
            BC, BS = 128, 32
        rows[(triton.cdiv(n, BS),)](
            x, target.contiguous(), weight.contiguous() if weight is not None else x, loss, share, B, C, S, xb, xc, xs,
            ignore_index, WEIGHTED=weight is not None, BS=BS, BC=BC, num_warps=8,
        )  # fmt: skip
    if reduction == "none":
        return loss
    out = torch.zeros((), dtype=input.dtype, device=input.device)
    add_up[(1,)](loss, share, out, n, MEAN=reduction == "mean", BLOCK=1024)
    return out
