# parts: pointwise
import torch
import triton
import triton.language as tl


@triton.jit
def op(x, s, t, MODE: tl.constexpr):
    return x.to(tl.int32, bitcast=True) < 0


def signbit(input, out=None):
    return pointwise(input, out=out, dtype=torch.bool)
