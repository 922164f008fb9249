"""One elementwise kernel with two results."""

import torch
import triton
import triton.language as tl


@triton.jit
def _signbit_and(x, other, bit, y, n, BOOL: tl.constexpr, BLOCK: tl.constexpr):
    o = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = o < n
    v = tl.load(x + o, mask=inside)
    w = tl.load(other + o, mask=inside)
    tl.store(bit + o, v.to(tl.int32, bitcast=True) < 0, mask=inside)
    if BOOL:
        tl.store(y + o, (v != 0) & w, mask=inside)
    else:
        # Not straight to int8: that conversion saturates on some versions and wraps on others.
        tl.store(y + o, v.to(tl.int32).to(tl.int8) & w, mask=inside)


def signbit_bitwise_and(input, other):
    x, w = input.contiguous(), other.contiguous()
    bit = torch.empty(x.shape, dtype=torch.bool, device=x.device)
    y = torch.empty(x.shape, dtype=w.dtype, device=x.device)
    n = x.numel()
    if n:
        # 16 elements a thread: 16 bytes a load of int8.
        _signbit_and[(triton.cdiv(n, 2048),)](x, w, bit, y, n, BOOL=w.dtype == torch.bool, BLOCK=2048, num_warps=4)
    return bit, y
