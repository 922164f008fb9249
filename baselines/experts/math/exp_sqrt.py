# parts: pointwise
import triton
import triton.language as tl


@triton.jit
def op(x, s, t, MODE: tl.constexpr):
    return tl.exp(0.5 * x)


def exp_sqrt(input, out=None):
    return pointwise(input, out=out)
