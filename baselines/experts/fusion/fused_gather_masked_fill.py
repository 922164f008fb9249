# parts: strided
"""One pass over the result; elements that are filled are not gathered."""

import torch
import triton
import triton.language as tl


@triton.jit
def _gather_fill(x, index, flags, y, rows, sizes, xs, ks, ms, ys, jump, value, DOWN: tl.constexpr, WIDE: tl.constexpr,
                 BR: tl.constexpr, BC: tl.constexpr):  # fmt: skip
    """xs are the strides of input without the gathered axis, jump is that axis's."""
    r, c, inside = cells(rows, sizes[0], BR, BC, WIDE, DOWN)
    fill = tl.load(flags + spot(r, c, sizes, ms), mask=inside, other=1) != 0
    slot = tl.load(index + spot(r, c, sizes, ks), mask=inside, other=0)
    v = tl.load(x + slot * jump + spot(r, c, sizes, xs), mask=inside & (fill == 0), other=0)
    tl.store(y + spot(r, c, sizes, ys), tl.where(fill, value.to(v.dtype), v), mask=inside)


def fused_gather_masked_fill(input, dim, index, mask, value, *, sparse_grad=False, out=None):
    dim %= input.dim()
    shape = index.shape
    y = torch.empty(shape, dtype=input.dtype, device=input.device) if out is None else out
    if not y.numel():
        return y
    flags = mask.expand(shape).view(torch.uint8)
    xs = [0 if d == dim else s for d, s in enumerate(input.stride())]
    sizes, (xs, ks, ms, ys), wide = lay(shape, xs, index.stride(), flags.stride(), y.stride())
    value = float(value) if input.is_floating_point() else int(value)
    # Across rows, every element reads a sector of its own, which its neighbours below need again: a strip of columns at
    # a time stays in the cache.
    down = dim < input.dim() - 1
    grid, rows, BR, BC = tiling(sizes, width=128 if down else 1024)
    _gather_fill[grid](
        input, index, flags, y, rows, sizes, xs, ks, ms, ys, input.stride(dim), value, DOWN=down, WIDE=wide, BR=BR,
        BC=BC, num_warps=4,
    )  # fmt: skip
    return y
