# parts: pointwise
import triton
import triton.language as tl


@triton.jit
def op(x, s, t, MODE: tl.constexpr):
    return 1.0 / x


def reciprocal(input, out=None):
    return pointwise(input, out=out)
