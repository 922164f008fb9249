# parts: strided
"""Lookup, sum and tanh in one launch; with max_norm a launch before it rescales the named rows."""

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice


@triton.jit
def _rescale(indices, weight, claimed, D, wr, wc, limit, p, SQUARE: tl.constexpr, BLOCK: tl.constexpr):
    """The first program that names a row claims it, so that it is rescaled once."""
    row = tl.load(indices + tl.program_id(0))
    mine = tl.atomic_xchg(claimed + row, 1) == 0
    base = weight + row * wr
    total = tl.zeros((BLOCK,), tl.float32)
    for c0 in range(0, D, BLOCK):
        c = c0 + tl.arange(0, BLOCK)
        v = tl.abs(tl.load(base + c.to(tl.int64) * wc, mask=(c < D) & mine, other=0.0))
        total += v * v if SQUARE else libdevice.pow(v, p)
    norm = tl.sum(total, 0)
    norm = tl.sqrt_rn(norm) if SQUARE else libdevice.pow(norm, 1.0 / p)
    scale = limit / (norm + 1e-7)
    for c0 in range(0, D, BLOCK):
        c = c0 + tl.arange(0, BLOCK)
        inside = (c < D) & mine & (norm > limit)
        v = tl.load(base + c.to(tl.int64) * wc, mask=inside)
        tl.store(base + c.to(tl.int64) * wc, v * scale, mask=inside)


@triton.jit
def _lookup(indices, weight, other, y, rows, D, wr, wc, sizes, bs, BR: tl.constexpr, BC: tl.constexpr):
    """A tile of the (rows, D) matrix; sizes and bs walk over the rows of other, whose columns are bs[0] apart."""
    r, c, inside = cells(rows, D, BR, BC, True)
    slot = tl.load(indices + r, mask=r < rows, other=0)
    v = tl.load(weight + slot * wr + c * wc, mask=inside)
    v += tl.load(other + spot(r, c, sizes, bs), mask=inside)
    # tanh(v) as 2 sigmoid(2 v) - 1: as accurate beside 1, and far cheaper than the library's.
    tl.store(y + r * D + c, 2.0 * tl.sigmoid(2.0 * v) - 1.0, mask=inside)


def fused_embedding_add_tanh(
    input_indices, weight, other, *, padding_idx=None, max_norm=None, norm_type=2.0, scale_grad_by_freq=False,
    sparse=False, out=None,
):  # fmt: skip
    V, D = weight.shape
    shape = (*input_indices.shape, D)
    indices, b = input_indices.contiguous(), other.expand(shape)
    fresh = out is None or not out.is_contiguous()
    y = torch.empty(shape, dtype=weight.dtype, device=weight.device) if fresh else out
    if not y.numel():
        return y if out is None else out
    wr, wc = weight.stride()
    if max_norm is not None:
        claimed = torch.zeros((V,), dtype=torch.int32, device=weight.device)
        _rescale[(indices.numel(),)](
            indices, weight, claimed, D, wr, wc, float(max_norm), float(norm_type), SQUARE=norm_type == 2,
            BLOCK=min(2048, triton.next_power_of_2(D)), num_warps=4,
        )  # fmt: skip
    sizes, (bs,), _ = lay(shape[:-1], b.stride()[:-1])
    sizes, bs = (D, *sizes), (b.stride(-1), *bs)
    grid, rows, BR, BC = tiling(sizes, 2048)
    _lookup[grid](indices, weight, b, y, rows, D, wr, wc, sizes, bs, BR=BR, BC=BC, num_warps=4)
    return y if out is None or out is y else out.copy_(y)
