# parts: pointwise
import triton
import triton.language as tl


@triton.jit
def op(x, s, t, MODE: tl.constexpr):
    return tl.sigmoid(x)


def sigmoid(input, out=None):
    return pointwise(input, out=out)
