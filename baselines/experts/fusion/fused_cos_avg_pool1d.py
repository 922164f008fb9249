"""One kernel: the cosines are taken where they are summed; windows that overlap find their inputs in the cache."""

import torch
import triton
import triton.language as tl


@triton.jit
def _cos_pool(
    x, y, rows, L, Lo, stride, padding, K: tl.constexpr, ALL: tl.constexpr, BR: tl.constexpr, BJ: tl.constexpr
):
    tiles = tl.cdiv(Lo, BJ)
    row = (tl.program_id(0) // tiles * BR + tl.arange(0, BR)).to(tl.int64)[:, None]
    j = (tl.program_id(0) % tiles * BJ + tl.arange(0, BJ))[None, :]
    inside = (row < rows) & (j < Lo)
    start = j * stride - padding
    total = tl.zeros((BR, BJ), tl.float32)
    for k in range(K):
        at = start + k
        valid = inside & (at >= 0) & (at < L)
        total += tl.where(valid, tl.cos(tl.load(x + row * L + at, mask=valid, other=0.0)), 0.0)
    end = tl.minimum(start + K, L + padding)
    if ALL:
        count = end - start
    else:
        count = tl.minimum(end, L) - tl.maximum(start, 0)
    tl.store(y + row * Lo + j, total / tl.maximum(count, 1).to(tl.float32), mask=inside)


# For small tensors: compiled once for all sizes and strides, the other once more for every kind of them.
_cos_pool_any = triton.jit(_cos_pool.fn, do_not_specialize=[p.name for p in _cos_pool.params if not p.is_constexpr])


def fused_cos_avg_pool1d(input, kernel_size, stride=None, padding=0, ceil_mode=False, count_include_pad=True):
    x = input.contiguous()
    N, C, L = x.shape
    stride = kernel_size if stride is None else stride
    room = L + 2 * padding - kernel_size + (stride - 1 if ceil_mode else 0)
    Lo = room // stride + 1
    if ceil_mode and (Lo - 1) * stride >= L + padding:
        Lo -= 1
    y = torch.empty((N, C, Lo), dtype=x.dtype, device=x.device)
    if y.numel():
        BJ = min(1024, triton.next_power_of_2(Lo))
        BR = min(1024 // BJ, triton.next_power_of_2(N * C))
        kernel = _cos_pool
        if x.numel() < 1 << 17:
            kernel, BR, BJ = _cos_pool_any, 16, 64
        kernel[(triton.cdiv(N * C, BR) * triton.cdiv(Lo, BJ),)](
            x, y, N * C, L, Lo, stride, padding, K=kernel_size, ALL=count_include_pad, BR=BR, BJ=BJ, num_warps=4
        )
    return y
