# parts: pointwise
import triton
import triton.language as tl


@triton.jit
def op(x, y, s, t, MODE: tl.constexpr):
    return x & y


def bitwise_and(input, other, out=None):
    return pointwise(input, other, out=out)
