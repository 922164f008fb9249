"""Average pooling along the last axis: tiles of rows by windows, a loop over the window."""

import torch
import triton
import triton.language as tl


@triton.jit
def _pool(x, y, rows, L, O, tiles, size, stride, padding, SIZE: tl.constexpr, BR: tl.constexpr, BO: tl.constexpr):
    # One axis of the grid for both: the second one of CUDA ends at 65535.
    row = (tl.program_id(0) // tiles).to(tl.int64) * BR + tl.arange(0, BR)
    o = tl.program_id(0) % tiles * BO + tl.arange(0, BO)
    inside = (row < rows)[:, None] & (o < O)[None, :]
    base = x + (row * L)[:, None]
    first = o * stride - padding
    total = tl.zeros((BR, BO), tl.float32)
    # Neighbouring windows share cache lines: only the first read of a line reaches memory.
    if SIZE > 0:
        for k in tl.static_range(SIZE):
            at = first + k
            total += tl.load(base + at[None, :], mask=inside & ((at >= 0) & (at < L))[None, :], other=0.0)
    else:
        for k in range(size):
            at = first + k
            total += tl.load(base + at[None, :], mask=inside & ((at >= 0) & (at < L))[None, :], other=0.0)
    tl.store(y + (row * O)[:, None] + o[None, :], total / size, mask=inside)


# For small tensors: compiled once for all sizes and strides, the other once more for every kind of them.
_pool_any = triton.jit(_pool.fn, do_not_specialize=[p.name for p in _pool.params if not p.is_constexpr])


def avg_pool1d(input, kernel_size, stride=None, padding=0):
    x = input.contiguous()
    stride = kernel_size if stride is None else stride
    L = x.shape[-1]
    O = (L + 2 * padding - kernel_size) // stride + 1
    y = torch.empty((*x.shape[:-1], O), dtype=x.dtype, device=x.device)
    if y.numel():
        rows = y.numel() // O
        BO = min(1024, triton.next_power_of_2(O))
        BR = min(1024 // BO, triton.next_power_of_2(rows))
        kernel, few = _pool, x.numel() < 1 << 17
        if few:
            kernel, BR, BO = _pool_any, 8, 64
        tiles = triton.cdiv(O, BO)
        kernel[(triton.cdiv(rows, BR) * tiles,)](
            x, y, rows, L, O, tiles, kernel_size, stride, padding,
            SIZE=kernel_size if kernel_size <= 16 and not few else 0, BR=BR, BO=BO,
        )  # fmt: skip
    return y
