# task: activation/leaky_relu
# shows: a scalar helper with an if, mapped over the block by tl.map_elementwise; block size chosen by a constexpr_function
# family: helpers

import torch
import triton
import triton.language as tl


@triton.constexpr_function
def _elements(warps, per_thread):
    return 32 * warps * per_thread


@triton.jit
def _leaky(v, slope):
    if v > 0:
        return v
    else:
        return v * slope


@triton.jit
def _kernel(x, y, n, slope, WARPS: tl.constexpr):
    BLOCK: tl.constexpr = _elements(WARPS, 4)
    tl.static_assert(BLOCK >= 128)
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(x + offs, mask=offs < n, other=0.0)
    s = tl.full((BLOCK,), slope, tl.float32)
    tl.store(y + offs, tl.map_elementwise(_leaky, v, s), mask=offs < n)


def leaky_relu(input, negative_slope=0.01, inplace=False):
    x = input.contiguous()
    y = x if inplace else torch.empty_like(x)
    n = x.numel()
    if n:
        _kernel[(triton.cdiv(n, 512),)](x, y, n, float(negative_slope), WARPS=4, num_warps=4)
    if not inplace:
        return y
    if y is not input:
        input.copy_(y)
    return input
