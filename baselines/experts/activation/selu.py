# parts: pointwise
import triton
import triton.language as tl
from triton.language.extra import libdevice


@triton.jit
def op(x, s, t, MODE: tl.constexpr):
    # Constants: scale, and scale * alpha; positive arguments never reach the exponential.
    return tl.where(x > 0.0, 1.0507009873554805 * x, 1.7580993408473766 * libdevice.expm1(tl.minimum(x, 0.0)))


def selu(input, inplace=False):
    return pointwise(input, out=input if inplace else None, bytes=32)
