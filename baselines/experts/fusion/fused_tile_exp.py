# parts: strided
"""Every element is read once and its exponential is stored to all its places in the result."""

import torch
import triton
import triton.language as tl


@triton.jit
def _tile_exp(x, y, rows, sizes, xs, ys, copies, share, repeats, steps, WIDE: tl.constexpr, BR: tl.constexpr,
              BC: tl.constexpr):  # fmt: skip
    r, c, inside = cells(rows, sizes[0], BR, BC, WIDE)
    v = tl.exp(tl.load(x + spot(r, c, sizes, xs), mask=inside))
    at = y + spot(r, c, sizes, ys)
    first = tl.program_id(1) * share
    for k in range(first, tl.minimum(first + share, copies)):
        copy = k.to(tl.int64) if WIDE else k
        tl.store(at + place(copy, repeats, steps, 0), v, mask=inside)


def fused_tile_exp(input, dims, *, out=None):
    rank = max(input.dim(), len(dims))
    dims = (1,) * (rank - len(dims)) + tuple(dims)
    x = input.expand((1,) * (rank - input.dim()) + tuple(input.shape))
    shape = [d * size for d, size in zip(dims, x.shape, strict=True)]
    y = torch.empty(shape, dtype=x.dtype, device=x.device) if out is None else out
    if not y.numel():
        return y
    # One copy further along axis d is as many elements further as the axis of the input is long.
    steps = [size * stride for size, stride in zip(x.shape, y.stride(), strict=True)]
    sizes, (xs, ys), wide = lay(x.shape, x.stride(), y.stride())
    repeats, (steps,), far = lay(dims, steps)
    copies = y.numel() // x.numel()
    (blocks,), rows, BR, BC = tiling(sizes)
    # Many copies of a small tensor are shared among programs.
    share = copies if blocks >= 1056 else max(triton.cdiv(copies * blocks, 2112), triton.cdiv(copies, 32768))
    _tile_exp[(blocks, triton.cdiv(copies, share))](
        x, y, rows, sizes, xs, ys, copies, share, repeats, steps, WIDE=wide or far or y.numel() >= 2**31 - 2**16, BR=BR,
        BC=BC, num_warps=4,
    )  # fmt: skip
    return y
