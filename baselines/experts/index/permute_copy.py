"""Tiles over the two axes that matter: the one that is contiguous in the input and the last one of the result."""

import torch
import triton
import triton.language as tl


@triton.jit
def _permute(x, y, I, J, i_x, j_x, i_y, j_y, sizes, x_strides, y_strides, BI: tl.constexpr, BJ: tl.constexpr):
    """A tile of I (fast in y) by J (fast in x); the compiler turns it through shared memory between load and store."""
    at = tl.program_id(0)
    j = at % tl.cdiv(J, BJ) * BJ + tl.arange(0, BJ)
    at = at // tl.cdiv(J, BJ)
    i = at % tl.cdiv(I, BI) * BI + tl.arange(0, BI)
    rest = (at // tl.cdiv(I, BI)).to(tl.int64)
    for d in tl.static_range(len(sizes)):
        x += rest % sizes[d] * x_strides[d]
        y += rest % sizes[d] * y_strides[d]
        rest = rest // sizes[d]
    inside = (i < I)[:, None] & (j < J)[None, :]
    i, j = i.to(tl.int64)[:, None], j.to(tl.int64)[None, :]
    tl.store(y + i * i_y + j * j_y, tl.load(x + i * i_x + j * j_x, mask=inside), mask=inside)


def permute_copy(input, dims):
    v = input.permute(dims)
    y = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    if not y.numel():
        return y
    # (size, stride in the input, stride in the result); neighbours that stay neighbours become one axis.
    axes = []
    for size, s, t in zip(v.shape, v.stride(), y.stride(), strict=True):
        if size == 1:
            continue
        if axes and axes[-1][1] == size * s:
            axes[-1] = (axes[-1][0] * size, s, t)
        else:
            axes.append((size, s, t))
    axes = [(1, 0, 0)] * (2 - len(axes)) + axes
    last = axes.pop()
    # The input's fastest axis; where that is the last one of the result too, rows of both.
    fast = min(range(len(axes)), key=lambda d: axes[d][1] if axes[d][0] > 1 else 1 << 62)
    if axes[fast][1] < last[1]:
        (J, j_x, j_y), (I, i_x, i_y) = axes.pop(fast), last
        BI, BJ = min(64, triton.next_power_of_2(I)), min(64, triton.next_power_of_2(J))
    else:
        (I, i_x, i_y), (J, j_x, j_y) = axes.pop(), last
        BJ = min(2048, triton.next_power_of_2(J))
        BI = min(2048 // BJ, triton.next_power_of_2(I))
    sizes, xs, ys = zip(*axes) if axes else ((1,), (0,), (0,))
    grid = triton.cdiv(I, BI) * triton.cdiv(J, BJ)
    for size in sizes:
        grid *= size
    warps = 8 if BI * BJ > 2048 else 4
    _permute[(grid,)](input, y, I, J, i_x, j_x, i_y, j_y, sizes, xs, ys, BI=BI, BJ=BJ, num_warps=warps)
    return y
