"""A copy of the base, then a kernel over the index: tiles of its rows by its last axis."""

import torch
import triton
import triton.language as tl


@triton.jit
def _copy(x, y, n, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + i, tl.load(x + i, mask=i < n), mask=i < n)


@triton.jit
def _scatter(src, index, y, rows, L, tiles, A, B, s0, s1, s2, s3, y0, y1, y2, y3, at_dim, BR: tl.constexpr,
             BL: tl.constexpr):  # fmt: skip
    """Index has the shape (?, A, B, L); y's stride along dim is at_dim, and 0 in y0 to y3."""
    # One axis of the grid for both: the second one of CUDA ends at 65535.
    row = (tl.program_id(0) // tiles).to(tl.int64) * BR + tl.arange(0, BR)
    l = tl.program_id(0) % tiles * BL + tl.arange(0, BL)
    inside = (row < rows)[:, None] & (l < L)[None, :]
    c, b, a = row % B, row // B % A, row // B // A
    slot = tl.load(index + (row * L)[:, None] + l[None, :], mask=inside, other=0)
    v = tl.load(src + (a * s0 + b * s1 + c * s2)[:, None] + (l.to(tl.int64) * s3)[None, :], mask=inside)
    place = (a * y0 + b * y1 + c * y2)[:, None] + (l.to(tl.int64) * y3)[None, :] + slot * at_dim
    tl.store(y + place, v, mask=inside)


def scatter(input, dim, index, src):
    x, index = input.contiguous(), index.contiguous()
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    n = x.numel()
    if n:
        _copy[(triton.cdiv(n, 2048),)](x, y, n, BLOCK=2048, num_warps=8)
    if index.numel():
        more = 4 - index.dim()
        at = [0 if d == dim % y.dim() else s for d, s in enumerate(y.stride())]
        _, A, B, L = (1,) * more + tuple(index.shape)
        rows = index.numel() // L
        BL = min(1024, triton.next_power_of_2(L))
        BR = 1024 // BL
        tiles = triton.cdiv(L, BL)
        _scatter[(triton.cdiv(rows, BR) * tiles,)](
            src, index, y, rows, L, tiles, A, B, *(0,) * more, *src.stride(), *(0,) * more, *at, y.stride(dim),
            BR=BR, BL=BL,
        )  # fmt: skip
    return y
