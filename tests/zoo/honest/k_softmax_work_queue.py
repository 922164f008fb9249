# task: math/softmax
# shows: programs draw their next row from an atomic counter until it runs out: which one does a row depends on the schedule, its result does not
# family: persistent kernels

import torch
import triton
import triton.language as tl


@triton.jit
def softmax_queue(x, y, queue, rows, n, ACC: tl.constexpr, BLOCK: tl.constexpr):
    cols = tl.arange(0, BLOCK)
    row = tl.atomic_add(queue, 1)
    while row < rows:
        px = x + row.to(tl.int64) * n
        py = y + row.to(tl.int64) * n
        top = tl.full((BLOCK,), float("-inf"), ACC)
        for c in range(0, n, BLOCK):
            v = tl.load(px + c + cols, mask=c + cols < n, other=float("-inf")).to(ACC)
            top = tl.maximum(top, v)
        peak = tl.max(top, 0)
        total = tl.zeros((BLOCK,), ACC)
        for c in range(0, n, BLOCK):
            v = tl.load(px + c + cols, mask=c + cols < n, other=float("-inf")).to(ACC)
            total += tl.exp(v - peak)
        inverse = 1.0 / tl.sum(total, 0)
        for c in range(0, n, BLOCK):
            v = tl.load(px + c + cols, mask=c + cols < n, other=float("-inf")).to(ACC)
            tl.store(py + c + cols, (tl.exp(v - peak) * inverse).to(y.dtype.element_ty), mask=c + cols < n)
        row = tl.atomic_add(queue, 1)


def softmax(input, dim, dtype=None):
    dtype = dtype or input.dtype
    x = input.movedim(dim, -1).contiguous()
    y = torch.empty(x.shape, dtype=dtype, device=x.device)
    if y.numel():
        n = x.shape[-1]
        rows = x.numel() // n
        queue = torch.zeros(1, dtype=torch.int32, device=x.device)
        acc = tl.float64 if dtype == torch.float64 else tl.float32
        block = min(1024, triton.next_power_of_2(n))
        softmax_queue[(min(rows, 132),)](x, y, queue, rows, n, ACC=acc, BLOCK=block, num_warps=4)
    return y.movedim(-1, dim)
