"""One elementwise kernel with two results."""

import torch
import triton
import triton.language as tl


@triton.jit
def _rad2deg_sqrt(x, degrees, root, n, BLOCK: tl.constexpr):
    o = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = o < n
    v = tl.load(x + o, mask=inside)
    tl.store(degrees + o, v * 57.29577951308232, mask=inside)
    tl.store(root + o, tl.sqrt(v), mask=inside)


def rad2deg_sqrt(input):
    x = input.contiguous()
    degrees = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    root = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    n = x.numel()
    if n:
        _rad2deg_sqrt[(triton.cdiv(n, 1024),)](x, degrees, root, n, BLOCK=1024, num_warps=8)
    return degrees, root
