# parts: pointwise
import triton
import triton.language as tl
from triton.language.extra import libdevice


@triton.jit
def op(x, s, t, MODE: tl.constexpr):
    return libdevice.lgamma(x)


def gammaln(input, out=None):
    return pointwise(input, out=out, bytes=32)
