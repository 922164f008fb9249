# parts: pointwise
import triton
import triton.language as tl
from triton.language.extra import libdevice


@triton.jit
def op(x, s, t, MODE: tl.constexpr):
    return libdevice.tanh(x)


def tanh(input_tensor, out_tensor=None):
    return pointwise(input_tensor, out=out_tensor)
