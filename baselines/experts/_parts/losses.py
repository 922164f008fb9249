import torch
import triton
import triton.language as tl


@triton.jit
def _each(x, target, weight, out, n, s, WEIGHTED: tl.constexpr, MODE: tl.constexpr, BLOCK: tl.constexpr):
    """One loss an element; the expert's file defines loss(x, target, s, MODE)."""
    e = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = e < n
    value = loss(tl.load(x + e, mask=inside, other=0.5), tl.load(target + e, mask=inside, other=0.5), s, MODE)
    if WEIGHTED:
        value = value * tl.load(weight + e, mask=inside, other=0.0)
    tl.store(out + e, value, mask=inside)


@triton.jit
def _partial(
    x, target, weight, parts, n, s, WEIGHTED: tl.constexpr, MODE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Every program sums its blocks, a grid apart, in registers."""
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(tl.program_id(0).to(tl.int64) * BLOCK, n, tl.num_programs(0) * BLOCK):
        e = start + tl.arange(0, BLOCK)
        inside = e < n
        value = loss(tl.load(x + e, mask=inside, other=0.5), tl.load(target + e, mask=inside, other=0.5), s, MODE)
        if WEIGHTED:
            value = value * tl.load(weight + e, mask=inside, other=0.0)
        total += tl.where(inside, value, 0.0)
    tl.store(parts + tl.program_id(0), tl.sum(total, 0))


@triton.jit
def _sum(parts, out, count, divisor, BLOCK: tl.constexpr):
    k = tl.arange(0, BLOCK)
    tl.store(out, tl.sum(tl.load(parts + k, mask=k < count, other=0.0), 0) / divisor)


def reduced(input, target, weight=None, reduction="mean", divisor=1, s=0.0, mode=0):
    """The losses themselves, or their sum over divisor: one pass and a small program."""
    shape = torch.broadcast_shapes(input.shape, target.shape)
    x, t = (v.expand(shape).contiguous() for v in (input, target))
    w = weight.expand(shape).contiguous() if weight is not None else x
    n = x.numel()
    if reduction == "none":
        out = torch.empty(shape, dtype=x.dtype, device=x.device)
        if n:
            _each[(triton.cdiv(n, 1024),)](
                x, t, w, out, n, s, WEIGHTED=weight is not None, MODE=mode, BLOCK=1024, num_warps=8
            )
        return out
    # A few programs for each of 132 multiprocessors.
    count = min(1024, triton.cdiv(n, 4096)) or 1
    parts = torch.empty(count, dtype=torch.float32, device=x.device)
    out = torch.empty((), dtype=x.dtype, device=x.device)
    _partial[(count,)](x, t, w, parts, n, s, WEIGHTED=weight is not None, MODE=mode, BLOCK=4096, num_warps=8)
    _sum[(1,)](parts, out, count, float(divisor), BLOCK=triton.next_power_of_2(count))
    return out
