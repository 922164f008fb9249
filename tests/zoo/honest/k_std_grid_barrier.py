# task: reduce/std
# shows: a grid-wide barrier (atomic count, spin) between two phases; the grid is launched cooperatively, all its programs are resident
# family: persistent kernels

import torch
import triton
import triton.language as tl


@triton.jit
def std_barrier(x, ws, y, bar, rows, n, chunks, correction, BLOCK: tl.constexpr, BC: tl.constexpr):
    pid, np = tl.program_id(0), tl.num_programs(0)
    for w in range(pid, rows * chunks, np):
        c = w % chunks
        o = c * BLOCK + tl.arange(0, BLOCK)
        v = tl.load(x + (w // chunks).to(tl.int64) * n + o, mask=o < n, other=0.0)
        k = tl.minimum(n - c * BLOCK, BLOCK)
        mean = tl.sum(v, 0) / k
        d = tl.where(o < n, v - mean, 0.0)
        tl.store(ws + 2 * w, mean)
        tl.store(ws + 2 * w + 1, tl.sum(d * d, 0))
    tl.debug_barrier()
    tl.atomic_add(bar, 1, sem="release")
    while tl.atomic_add(bar, 0, sem="acquire") < np:
        pass
    for row in range(pid, rows, np):
        num = tl.zeros((BC,), tl.float32)
        for c0 in range(0, chunks, BC):
            c = c0 + tl.arange(0, BC)
            k = tl.where(c < chunks, tl.minimum(n - c * BLOCK, BLOCK), 0).to(tl.float32)
            num += k * tl.load(ws + 2 * (row * chunks + c), mask=c < chunks, other=0.0, volatile=True)
        mean = tl.sum(num, 0) / n
        m2 = tl.zeros((BC,), tl.float32)
        for c0 in range(0, chunks, BC):
            c = c0 + tl.arange(0, BC)
            k = tl.where(c < chunks, tl.minimum(n - c * BLOCK, BLOCK), 0).to(tl.float32)
            d = tl.load(ws + 2 * (row * chunks + c), mask=c < chunks, other=0.0, volatile=True) - mean
            m2 += k * d * d + tl.load(ws + 2 * (row * chunks + c) + 1, mask=c < chunks, other=0.0, volatile=True)
        tl.store(y + row, tl.sqrt(tl.sum(m2, 0) / (n - correction)))


def std(input, dim=None, correction=1, keepdim=False, out=None):
    if dim is None:
        x = input.contiguous().view(1, -1)
        shape = (1,) * input.dim() if keepdim else ()
    else:
        d = dim % input.dim()
        x = input.movedim(d, -1).contiguous()
        shape = input.shape[:d] + ((1,) if keepdim else ()) + input.shape[d + 1 :]
    n = x.shape[-1]
    y = torch.empty(shape, dtype=torch.float32, device=x.device)
    rows, chunks = y.numel(), triton.cdiv(n, 1024)
    if rows:
        ws = torch.empty((rows, chunks, 2), dtype=torch.float32, device=x.device)
        bar = torch.zeros(1, dtype=torch.int32, device=x.device)
        # All programs must be resident at once: no more than the multiprocessors.
        std_barrier[(min(rows * chunks, 64),)](
            x, ws, y, bar, rows, n, chunks, correction, BLOCK=1024, BC=16, launch_cooperative_grid=True
        )
    return y if out is None else out.copy_(y)
