"""One elementwise kernel with two results."""

import torch
import triton
import triton.language as tl


@triton.jit
def _cos_signbit(x, y, bit, n, BLOCK: tl.constexpr):
    o = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = o < n
    c = tl.cos(tl.load(x + o, mask=inside))
    tl.store(y + o, c, mask=inside)
    tl.store(bit + o, c.to(tl.int32, bitcast=True) < 0, mask=inside)


def fused_cos_signbit(input):
    x = input.contiguous()
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    bit = torch.empty(x.shape, dtype=torch.bool, device=x.device)
    n = x.numel()
    if n:
        _cos_signbit[(triton.cdiv(n, 1024),)](x, y, bit, n, BLOCK=1024, num_warps=4)
    return y, bit
