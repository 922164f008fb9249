# task: index/masked_select
# shows: counts per block, one program that scans them, the length read back, then a scatter by tl.cumsum
# family: several launches

import torch
import triton
import triton.language as tl


@triton.jit
def count_true(mask, counts, n, BLOCK: tl.constexpr):
    pid = tl.program_id(0)
    o = pid.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    m = tl.load(mask + o, mask=o < n, other=0)
    tl.store(counts + pid, tl.sum((m != 0).to(tl.int32), axis=0))


@triton.jit
def scan_counts(counts, starts, blocks, BLOCK: tl.constexpr):
    """Exclusive sums, and the total behind them."""
    carry = tl.zeros((), dtype=tl.int64)
    for b in range(0, blocks, BLOCK):
        o = b + tl.arange(0, BLOCK)
        c = tl.load(counts + o, mask=o < blocks, other=0).to(tl.int64)
        tl.store(starts + o, carry + tl.cumsum(c, 0) - c, mask=o < blocks)
        carry += tl.sum(c, 0)
    tl.store(starts + blocks, carry)


@triton.jit
def compact(x, mask, starts, y, n, BLOCK: tl.constexpr):
    pid = tl.program_id(0)
    o = pid.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    take = tl.load(mask + o, mask=o < n, other=0) != 0
    slot = tl.load(starts + pid) + tl.cumsum(take.to(tl.int32), 0) - 1
    tl.store(y + slot, tl.load(x + o, mask=take), mask=take)


def masked_select(input, mask):
    x, m = torch.broadcast_tensors(input, mask)
    x, m = x.contiguous(), m.contiguous().view(torch.uint8)
    n = x.numel()
    if n == 0:
        return torch.empty(0, dtype=x.dtype, device=x.device)
    blocks = triton.cdiv(n, 1024)
    counts = torch.empty(blocks, dtype=torch.int32, device=x.device)
    starts = torch.empty(blocks + 1, dtype=torch.int64, device=x.device)
    count_true[(blocks,)](m, counts, n, BLOCK=1024)
    scan_counts[(1,)](counts, starts, blocks, BLOCK=1024)
    y = torch.empty(starts[blocks].item(), dtype=x.dtype, device=x.device)
    raw = (lambda t: t.view(torch.uint8)) if x.dtype == torch.bool else (lambda t: t)
    if y.numel():
        compact[(blocks,)](raw(x), m, starts, raw(y), n, BLOCK=1024)
    return y
