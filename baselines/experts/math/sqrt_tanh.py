# parts: pointwise
import triton
import triton.language as tl
from triton.language.extra import libdevice


@triton.jit
def op(x, s, t, MODE: tl.constexpr):
    return libdevice.tanh(tl.sqrt(x))


def sqrt_tanh(input, out=None):
    return pointwise(input, out=out)
