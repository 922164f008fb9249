import torch
import triton
import triton.language as tl


@triton.jit
def _count(mask, counts, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    flags = tl.load(mask + offsets, mask=offsets < n, other=0).to(tl.int32)
    tl.store(counts + tl.program_id(0), tl.sum(flags, 0))


@triton.jit
def _scan(counts, starts, total, blocks, BLOCK: tl.constexpr):
    """Exclusive prefix sum of the block counts by one program."""
    before = tl.zeros((), tl.int64)
    for b0 in range(0, blocks, BLOCK):
        b = b0 + tl.arange(0, BLOCK)
        c = tl.load(counts + b, mask=b < blocks, other=0).to(tl.int64)
        tl.store(starts + b, before + tl.cumsum(c, 0) - c, mask=b < blocks)
        before += tl.sum(c, 0)
    tl.store(total, before)


@triton.jit
def _scatter(x, mask, starts, y, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    flags = tl.load(mask + offsets, mask=offsets < n, other=0).to(tl.int32)
    place = tl.load(starts + tl.program_id(0)) + tl.cumsum(flags, 0) - 1
    chosen = flags != 0
    tl.store(y + place, tl.load(x + offsets, mask=chosen), mask=chosen)


def masked_select(input, mask):
    shape = torch.broadcast_shapes(input.shape, mask.shape)
    x = input.expand(shape).contiguous()
    flags = mask.expand(shape).contiguous().view(torch.uint8)
    n = x.numel()
    if n == 0:
        return torch.empty((0,), dtype=x.dtype, device=x.device)
    BLOCK = 1024
    blocks = triton.cdiv(n, BLOCK)
    counts = torch.empty((blocks,), dtype=torch.int32, device=x.device)
    starts = torch.empty((blocks,), dtype=torch.int64, device=x.device)
    total = torch.zeros((1,), dtype=torch.int64, device=x.device)
    _count[(blocks,)](flags, counts, n, BLOCK=BLOCK)
    _scan[(1,)](counts, starts, total, blocks, BLOCK=1024)
    y = torch.empty((total.item(),), dtype=x.dtype, device=x.device)
    if y.numel():
        _scatter[(blocks,)](x, flags, starts, y, n, BLOCK=BLOCK)
    return y
