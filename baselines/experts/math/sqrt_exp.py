# parts: pointwise
import triton
import triton.language as tl


@triton.jit
def op(x, s, t, MODE: tl.constexpr):
    return tl.exp(tl.sqrt(x))


def sqrt_exp(input, out=None):
    return pointwise(input, out=out)
