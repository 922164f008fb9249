# task: reduce/argmax
# shows: atomic_max of ordered int64 keys into a filled accumulator, a second launch takes the first index by atomic_min; order cannot matter
# family: several launches

import math

import torch
import triton
import triton.language as tl


@triton.jit
def ordered_key(v):
    """A number that sorts as argmax wants it: NaN on top, both zeros equal."""
    if v.dtype.is_floating():
        f = v.to(tl.float32)
        f = tl.where(f == 0.0, 0.0, f)
        bits = f.to(tl.int32, bitcast=True)
        bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
        return tl.where(f != f, 0x7FFFFFFF, bits).to(tl.int64)
    else:
        return v


@triton.jit
def best_key_kernel(x, best, n, chunks, BLOCK: tl.constexpr):
    row = (tl.program_id(0) // chunks).to(tl.int64)
    o = tl.program_id(0) % chunks * BLOCK + tl.arange(0, BLOCK)
    key = ordered_key(tl.load(x + row * n + o, mask=o < n, other=0))
    lowest: tl.constexpr = -0x7FFFFFFFFFFFFFFF - 1
    tl.atomic_max(best + row, tl.max(tl.where(o < n, key, lowest), axis=0), sem="relaxed")


@triton.jit
def first_index_kernel(x, best, index, n, chunks, BLOCK: tl.constexpr):
    row = (tl.program_id(0) // chunks).to(tl.int64)
    o = tl.program_id(0) % chunks * BLOCK + tl.arange(0, BLOCK)
    key = ordered_key(tl.load(x + row * n + o, mask=o < n, other=0))
    hit = (key == tl.load(best + row)) & (o < n)
    candidate = tl.min(tl.where(hit, o, n).to(tl.int64), axis=0)
    if candidate < n:
        tl.atomic_min(index + row, candidate, sem="relaxed")


def argmax(input_tensor, dim, keepdim=False):
    moved = input_tensor.movedim(dim, -1)
    x = moved.contiguous()
    kept, n = x.shape[:-1], x.shape[-1]
    rows = math.prod(kept)
    best = torch.full(kept, -(2**63), dtype=torch.int64, device=x.device)
    index = torch.full(kept, n, dtype=torch.int64, device=x.device)
    if rows:
        chunks = triton.cdiv(n, 512)
        best_key_kernel[(rows * chunks,)](x, best, n, chunks, BLOCK=512)
        first_index_kernel[(rows * chunks,)](x, best, index, n, chunks, BLOCK=512)
    return index.unsqueeze(dim) if keepdim else index
