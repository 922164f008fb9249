# parts: pointwise
import triton
import triton.language as tl


@triton.jit
def op(x, s, t, MODE: tl.constexpr):
    return tl.log(x)


def log(input, out=None):
    return pointwise(input, out=out)
