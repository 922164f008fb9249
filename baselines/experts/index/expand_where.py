"""Select with broadcast operands: nothing is materialised, the strides of repeated axes are 0."""

import torch
import triton
import triton.language as tl


@triton.jit
def _select(x, cond, other, y, n, rows_axis, A, B, C, x0, x1, x2, x3, x4, c0, c1, c2, c3, c4, o0, o1, o2, o3, o4,
            BLOCK: tl.constexpr):  # fmt: skip
    """One block of one row of y (shape (?, A, B, C, n))."""
    # Row and block share the first axis of the grid: the others end at 65535.
    row = (tl.program_id(0) // rows_axis).to(tl.int64)
    i = tl.program_id(0) % rows_axis * BLOCK + tl.arange(0, BLOCK)
    k, j, h, g = row % C, row // C % B, row // C // B % A, row // C // B // A
    inside = i < n
    pick = tl.load(cond + g * c0 + h * c1 + j * c2 + k * c3 + i * c4, mask=inside, other=0) != 0
    # Each tensor is read only where it is chosen.
    a = tl.load(x + g * x0 + h * x1 + j * x2 + k * x3 + i * x4, mask=inside & pick, other=0.0)
    b = tl.load(other + g * o0 + h * o1 + j * o2 + k * o3 + i * o4, mask=inside & (pick == 0), other=0.0)
    tl.store(y + row * n + i, tl.where(pick, a, b), mask=inside)


def expand_where(input, target_sizes, cond, other):
    x = input.expand(target_sizes)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if y.numel():
        five = (*(1,) * (5 - x.dim()), *x.shape)
        views = [v.expand(x.shape).expand(five) for v in (x, cond.view(torch.uint8), other)]
        n = five[4]
        BLOCK = min(2048, triton.next_power_of_2(n))
        blocks = triton.cdiv(n, BLOCK)
        strides = [s for v in views for s in v.stride()]
        _select[(y.numel() // n * blocks,)](
            *views, y, n, blocks, *five[1:4], *strides, BLOCK=BLOCK, num_warps=max(1, min(8, BLOCK // 256))
        )
    return y
