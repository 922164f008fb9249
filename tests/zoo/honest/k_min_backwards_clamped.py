# task: reduce/min
# shows: no load masks but clamped indices, a custom tl.reduce combiner, and a loop that runs backwards to find the first index
# family: order of work

import torch
import triton
import triton.language as tl


@triton.jit
def nan_min(a, b):
    return tl.where((a < b) | (a != a), a, b)


@triton.jit
def min_rows(x, values, indices, n, last, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    x += row * n
    lane = tl.arange(0, BLOCK)
    acc = tl.load(x + tl.minimum(lane, n - 1))
    for c in range(BLOCK, n, BLOCK):
        acc = nan_min(acc, tl.load(x + tl.minimum(c + lane, n - 1)))
    best = tl.reduce(acc, 0, nan_min)
    first = n
    for c in range(last, -1, -BLOCK):
        i = tl.minimum(c + lane, n - 1)  # lanes beyond the end look at the last element again
        v = tl.load(x + i)
        hit = (v == best) | ((v != v) & (best != best))
        first = tl.minimum(first, tl.min(tl.where(hit, i, n), 0))
    tl.store(values + row, best)
    tl.store(indices + row, first.to(tl.int64))


def min(input_tensor, dim, keepdim=False):
    x = input_tensor.movedim(dim, -1).contiguous()
    n = x.shape[-1]
    values = torch.empty(x.shape[:-1], dtype=x.dtype, device=x.device)
    indices = torch.empty(x.shape[:-1], dtype=torch.int64, device=x.device)
    rows = values.numel()
    if rows:
        block = 256 if n > 64 else 32
        min_rows[(rows,)](x, values, indices, n, (n - 1) // block * block, BLOCK=block, num_warps=1)
    if keepdim:
        return values.unsqueeze(dim), indices.unsqueeze(dim)
    return values, indices
