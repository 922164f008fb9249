# task: reduce/std
# shows: mean and M2 of chunks in a workspace, merged by Chan's formula in a second launch
# family: several launches

import torch
import triton
import triton.language as tl


@triton.jit
def chunk_moments(x, ws, n, chunks, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1)
    o = c * BLOCK + tl.arange(0, BLOCK)
    ok = o < n
    v = tl.load(x + row * n + o, mask=ok, other=0.0)
    count = tl.minimum(n - c * BLOCK, BLOCK)
    mean = tl.sum(v, 0) / count
    d = tl.where(ok, v - mean, 0.0)
    tl.store(ws + (row * chunks + c) * 2, mean)
    tl.store(ws + (row * chunks + c) * 2 + 1, tl.sum(d * d, 0))


@triton.jit
def merge_moments(ws, y, n, chunks, correction, BLOCK: tl.constexpr, BC: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    count = 0.0
    mean = 0.0
    m2 = 0.0
    for c0 in range(0, chunks, BC):
        c = c0 + tl.arange(0, BC)
        p = ws + (row * chunks + c) * 2
        w = tl.where(c < chunks, tl.minimum(n - c * BLOCK, BLOCK), 0).to(tl.float32)
        a = tl.load(p, mask=c < chunks, other=0.0)
        b = tl.load(p + 1, mask=c < chunks, other=0.0)
        part = tl.sum(w, 0)
        base = tl.load(ws + (row * chunks + c0) * 2)  # near to all the means
        part_mean = base + tl.sum(w * (a - base), 0) / part
        part_m2 = tl.sum(b + w * (a - part_mean) * (a - part_mean), 0)
        delta = part_mean - mean
        total = count + part
        m2 += part_m2 + delta * delta * (count * part / total)
        mean += delta * (part / total)
        count = total
    tl.store(y + row, tl.sqrt(m2 / (n - correction).to(tl.float32)))


def std(input, dim=None, correction=1, keepdim=False, out=None):
    x = input.contiguous()
    if dim is None:
        x = x.view(1, -1)
        shape = (1,) * input.dim() if keepdim else ()
    else:
        d = dim % input.dim()
        x = x.movedim(d, -1).contiguous()
        shape = input.shape[:d] + ((1,) if keepdim else ()) + input.shape[d + 1 :]
    n = x.shape[-1]
    y = torch.empty(shape, dtype=torch.float32, device=x.device)
    rows, chunks = y.numel(), triton.cdiv(n, 1024)
    if rows:
        ws = torch.empty((rows, chunks, 2), dtype=torch.float32, device=x.device)
        chunk_moments[(rows, chunks)](x, ws, n, chunks, BLOCK=1024)
        merge_moments[(rows,)](ws, y, n, chunks, correction, BLOCK=1024, BC=64)
    if out is None:
        return y
    out.copy_(y)
    return out
