"""Writes the chosen slices through the strides of x: tiles of positions by elements of a slice."""

import triton
import triton.language as tl


@triton.jit
def _fill(x, index, value, K, R, blocks, tiles, at_dim, sizes, strides, K_FAST: tl.constexpr, BK: tl.constexpr,
          BR: tl.constexpr):  # fmt: skip
    # One axis of the grid for both: the second one of CUDA ends at 65535. What lies together is written together.
    k = (tl.program_id(0) % blocks if K_FAST else tl.program_id(0) // tiles) * BK + tl.arange(0, BK)
    r = (tl.program_id(0) // blocks if K_FAST else tl.program_id(0) % tiles) * BR + tl.arange(0, BR)
    slot = tl.load(index + k, mask=k < K, other=0)
    inside = (k < K)[:, None] & (r < R)[None, :]
    rest = r.to(tl.int64)
    place = tl.zeros((BR,), tl.int64)
    # The last of the axes needs no remainder; a contiguous x has at most two.
    for d in tl.static_range(len(sizes)):
        if d < len(sizes) - 1:
            place += rest % sizes[d] * strides[d]
            rest = rest // sizes[d]
        else:
            place += rest * strides[d]
    tl.store(x + (slot * at_dim)[:, None] + place[None, :], tl.full((BK, BR), value, tl.float32), mask=inside)


def index_fill_(dim, x, index, value):
    at = x.stride(dim)
    sizes, strides = [], []
    # The other axes, the fastest one first; neighbours that follow one another in memory become one.
    for d in reversed([d for d in range(x.dim()) if d != dim % x.dim()]):
        if sizes and x.stride(d) == sizes[-1] * strides[-1]:
            sizes[-1] *= x.shape[d]
        else:
            sizes.append(x.shape[d])
            strides.append(x.stride(d))
    K = index.numel()
    if K and x.numel():
        R = x.numel() // x.shape[dim]
        fast = not strides or at < strides[0]
        BK, BR = min(1024, triton.next_power_of_2(K)), min(1024, triton.next_power_of_2(R))
        BK, BR = (BK, min(BR, 1024 // BK)) if fast else (min(BK, 1024 // BR), BR)
        blocks, tiles = triton.cdiv(K, BK), triton.cdiv(R, BR)
        _fill[(blocks * tiles,)](
            x, index.contiguous(), float(value), K, R, blocks, tiles, at, tuple(sizes or [1]), tuple(strides or [0]),
            K_FAST=fast, BK=BK, BR=BR,
        )  # fmt: skip
    return x
