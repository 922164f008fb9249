"""Two launches: each chunk counts its True elements, then each finds its place by adding up the chunks before it."""

import torch
import triton
import triton.language as tl


@triton.jit
def _count(mask, counts, total, n, chunk, WIDE: tl.constexpr, BLOCK: tl.constexpr):
    first = tl.program_id(0).to(tl.int64) * chunk if WIDE else tl.program_id(0) * chunk
    count = tl.zeros((BLOCK,), tl.int32)
    end = tl.minimum(n, first + chunk)
    for e0 in range(first, end, BLOCK):
        e = e0 + tl.arange(0, BLOCK)
        count += tl.load(mask + e, mask=e < end, other=0).to(tl.int32)
    here = tl.sum(count, 0).to(tl.int64)
    tl.store(counts + tl.program_id(0), here)
    tl.atomic_add(total, here)


@triton.jit
def _select(x, mask, other, counts, y, n, chunk, step, alpha, NUMBER: tl.constexpr, TANH: tl.constexpr,
            CHUNKS: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    chunks = tl.arange(0, CHUNKS)
    start = tl.sum(tl.load(counts + chunks, mask=chunks < tl.program_id(0), other=0), 0)
    first = tl.program_id(0).to(tl.int64) * chunk if WIDE else tl.program_id(0) * chunk
    end = tl.minimum(n, first + chunk)
    for e0 in range(first, end, BLOCK):
        e = e0 + tl.arange(0, BLOCK)
        flags = tl.load(mask + e, mask=e < end, other=0).to(tl.int32)
        chosen = flags != 0
        # The load does not wait for the places: whole sectors are fetched either way.
        v = tl.load(x + e, mask=chosen)
        at = start + tl.cumsum(flags, 0) - 1
        start += tl.sum(flags, 0)
        v += alpha * (other if NUMBER else tl.load(other + at * step, mask=chosen))
        if TANH:
            # v / 2 * (1 + tanh(u)) is v * sigmoid(2 u): one exponential and no cancellation.
            r = v * tl.sigmoid(1.5957691216057308 * (v + 0.044715 * v * v * v))
        else:
            r = 0.5 * v * (1.0 + tl.erf(v * 0.7071067811865476))
        tl.store(y + at, r, mask=chosen)


def fused_masked_select_add_gelu(input, mask, other, *, alpha=1, approximate="none", out=None):
    shape = torch.broadcast_shapes(input.shape, mask.shape)
    x, flags = input.expand(shape).contiguous(), mask.expand(shape).contiguous().view(torch.uint8)
    n = x.numel()
    if n == 0:
        return torch.empty((0,), dtype=x.dtype, device=x.device) if out is None else out
    wide = n >= 2**31 - 2**16
    BLOCK, CHUNKS = 2048, 2048
    chunk = triton.cdiv(triton.cdiv(n, BLOCK), CHUNKS) * BLOCK
    grid = (triton.cdiv(n, chunk),)
    counts = torch.empty((CHUNKS,), dtype=torch.int64, device=x.device)
    total = torch.zeros((1,), dtype=torch.int64, device=x.device)
    _count[grid](flags, counts, total, n, chunk, WIDE=wide, BLOCK=BLOCK, num_warps=4)
    length = total.item()
    y = torch.empty((length,), dtype=x.dtype, device=x.device) if out is None or not out.is_contiguous() else out
    if length:
        number = not isinstance(other, torch.Tensor)
        step = 0 if number or other.numel() == 1 else other.stride(0)
        _select[grid](
            x, flags, float(other) if number else other, counts, y, n, chunk, step, float(alpha),
            NUMBER=number, TANH=approximate == "tanh", CHUNKS=CHUNKS, WIDE=wide, BLOCK=BLOCK, num_warps=8,
        )  # fmt: skip
    return y if out is None or out is y else out.copy_(y)
