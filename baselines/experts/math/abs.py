# parts: pointwise
import triton
import triton.language as tl


@triton.jit
def op(x, s, t, MODE: tl.constexpr):
    return tl.abs(x)


def abs(input_tensor, out=None):
    return pointwise(input_tensor, out=out)
