"""Negative log-likelihood: a gather, then sums of losses and weights in two stages."""

import torch
import triton
import triton.language as tl


@triton.jit
def _pick(x, target, weight, b, B, xb, xc, tb, wc, ignored, WEIGHTED: tl.constexpr):
    """Loss and weight of the rows b, both 0 for ignored rows and beyond the end."""
    t = tl.load(target + b * tb, mask=b < B, other=0)
    counted = (b < B) & (t != ignored)
    w = tl.where(counted, 1.0, 0.0)
    if WEIGHTED:
        w = tl.load(weight + t * wc, mask=counted, other=0.0)
    return -w * tl.load(x + b * xb + t * xc, mask=counted, other=0.0), w


@triton.jit
def _rows(x, target, weight, y, B, xb, xc, tb, wc, ignored, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr):
    b = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value, _ = _pick(x, target, weight, b, B, xb, xc, tb, wc, ignored, WEIGHTED)
    tl.store(y + b, value, mask=b < B)


@triton.jit
def _sums(
    x, target, weight, sums, B, rounds, xb, xc, tb, wc, ignored, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Every program adds up ``rounds`` blocks of rows: sums[0] are losses, sums[1] weights."""
    programs = tl.num_programs(0).to(tl.int64)
    losses = tl.zeros((BLOCK,), tl.float32)
    weights = tl.zeros((BLOCK,), tl.float32)
    for r in range(rounds):
        b = (r * programs + tl.program_id(0)) * BLOCK + tl.arange(0, BLOCK)
        value, w = _pick(x, target, weight, b, B, xb, xc, tb, wc, ignored, WEIGHTED)
        losses += value
        weights += w
    tl.store(sums + tl.program_id(0), tl.sum(losses, 0))
    tl.store(sums + programs + tl.program_id(0), tl.sum(weights, 0))


@triton.jit
def _finish(sums, y, n, MEAN: tl.constexpr, BLOCK: tl.constexpr):
    p = tl.arange(0, BLOCK)
    result = tl.sum(tl.load(sums + p, mask=p < n, other=0.0), 0)
    if MEAN:
        result = result / tl.sum(tl.load(sums + n + p, mask=p < n, other=0.0), 0)
    tl.store(y, result)


# For small tensors: compiled once for all sizes and strides, the other once more for every kind of them.
_rows_any = triton.jit(_rows.fn, do_not_specialize=[p.name for p in _rows.params if not p.is_constexpr])
_sums_any = triton.jit(_sums.fn, do_not_specialize=[p.name for p in _sums.params if not p.is_constexpr])
_finish_any = triton.jit(_finish.fn, do_not_specialize=[p.name for p in _finish.params if not p.is_constexpr])


def nll_loss(input, target, weight=None, ignore_index=-100, reduction="mean"):
    """Only the picked numbers are read, whatever the strides: no input is copied."""
    B = input.shape[0]
    y = torch.empty((B,) if reduction == "none" else (), dtype=input.dtype, device=input.device)
    few = input.numel() < 1 << 17
    rows, add_up, finish = (_rows_any, _sums_any, _finish_any) if few else (_rows, _sums, _finish)
    weighted = weight is not None
    w = weight if weighted else input
    strides = (*input.stride(), target.stride(0), w.stride(0))
    if reduction == "none":
        if B:
            rows[(triton.cdiv(B, 512),)](
                input, target, w, y, B, *strides, ignore_index, WEIGHTED=weighted, BLOCK=512, num_warps=4
            )
        return y
    programs = max(1, min(2048, triton.cdiv(B, 512)))
    sums = torch.empty((2, programs), dtype=input.dtype, device=input.device)
    add_up[(programs,)](
        input, target, w, sums, B, triton.cdiv(B, 512 * programs), *strides, ignore_index,
        WEIGHTED=weighted, BLOCK=512, num_warps=4,
    )  # fmt: skip
    finish[(1,)](sums, y, programs, MEAN=reduction == "mean", BLOCK=2048, num_warps=4)
    return y
