"""A correct kernel for the task math/exp_sqrt: sqrt(exp(x)) = exp(x / 2)."""

import torch
import triton
import triton.language as tl


@triton.jit
def _exp_sqrt(x, y, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < n
    tl.store(y + i, tl.exp(tl.load(x + i, mask=inside) * 0.5), mask=inside)


def exp_sqrt(input, out=None):
    """Work on a contiguous copy, and copy the result where the caller wants it."""
    x = input.contiguous()
    y = torch.empty_like(x)
    n = x.numel()
    if n:
        _exp_sqrt[(triton.cdiv(n, 256),)](x, y, n, BLOCK=256)
    return y if out is None else out.copy_(y)
