"""Gather of slices: tiles of (outer, position) rows by contiguous inner elements."""

import torch
import triton
import triton.language as tl


@triton.jit
def _gather(x, index, y, N, K, rows, inner, tiles, BR: tl.constexpr, BI: tl.constexpr):
    # One axis of the grid for both: the second one of CUDA ends at 65535.
    row = (tl.program_id(0) // tiles).to(tl.int64) * BR + tl.arange(0, BR)
    i = tl.program_id(0) % tiles * BI + tl.arange(0, BI)
    slot = tl.load(index + row % K, mask=row < rows, other=0)
    inside = (row < rows)[:, None] & (i < inner)[None, :]
    v = tl.load(x + ((row // K * N + slot) * inner)[:, None] + i[None, :], mask=inside)
    tl.store(y + (row * inner)[:, None] + i[None, :], v, mask=inside)


def index_select(input, dim, index):
    x = input.contiguous()
    dim %= x.dim()
    N, K = x.shape[dim], index.numel()
    y = torch.empty((*x.shape[:dim], K, *x.shape[dim + 1 :]), dtype=x.dtype, device=x.device)
    if y.numel():
        inner = 1
        for size in x.shape[dim + 1 :]:
            inner *= size
        rows = y.numel() // inner
        BI = min(1024, triton.next_power_of_2(inner))
        BR = 1024 // BI
        tiles = triton.cdiv(inner, BI)
        _gather[(triton.cdiv(rows, BR) * tiles,)](x, index.contiguous(), y, N, K, rows, inner, tiles, BR=BR, BI=BI)
    return y
