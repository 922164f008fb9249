# parts: strided
"""One pass over the result: each row finds its place in input through index and is compared at once."""

import torch
import triton
import triton.language as tl


@triton.jit
def _select_eq(x, index, b, y, rows, sizes, xs, ks, bs, ys, step, jump, LAST: tl.constexpr, NUMBER: tl.constexpr,
               WIDE: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr):  # fmt: skip
    """ks leads to the position in index; step is the stride of index, jump that of the selected axis (LAST or not)."""
    r, c, inside = cells(rows, sizes[0], BR, BC, WIDE)
    if LAST:
        slot = tl.load(index + spot(r, c, sizes, ks) * step, mask=inside, other=0)
    else:
        slot = tl.load(index + place(r, sizes, ks, 1) * step, mask=r < rows, other=0)
    v = tl.load(x + slot * jump + spot(r, c, sizes, xs), mask=inside)
    w = b if NUMBER else tl.load(b + spot(r, c, sizes, bs), mask=inside)
    tl.store(y + spot(r, c, sizes, ys), (v == w).to(tl.uint8), mask=inside)


def fused_index_select_eq(input, dim, index, other, *, out=None):
    dim %= input.dim()
    shape = (*input.shape[:dim], index.numel(), *input.shape[dim + 1 :])
    y = torch.empty(shape, dtype=torch.bool, device=input.device) if out is None else out
    if not y.numel():
        return y
    number = not isinstance(other, torch.Tensor)
    xs = [0 if d == dim else s for d, s in enumerate(input.stride())]
    ks = [1 if d == dim else 0 for d in range(input.dim())]
    bs = y.stride() if number else other.expand(shape).stride()
    sizes, (xs, ks, bs, ys), wide = lay(shape, xs, ks, bs, y.stride())
    if number:
        other = float(other) if input.is_floating_point() else int(other)
    grid, rows, BR, BC = tiling(sizes, 2048)
    _select_eq[grid](
        input, index, other, y.view(torch.uint8), rows, sizes, xs, ks, bs, ys, index.stride(0), input.stride(dim),
        LAST=ks[0] == 1, NUMBER=number, WIDE=wide, BR=BR, BC=BC, num_warps=4,
    )  # fmt: skip
    return y
