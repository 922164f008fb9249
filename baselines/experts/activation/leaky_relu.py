# parts: pointwise
import triton
import triton.language as tl


@triton.jit
def op(x, s, t, MODE: tl.constexpr):
    return tl.where(x > 0.0, x, x * s)


def leaky_relu(input, negative_slope=0.01, inplace=False):
    return pointwise(input, out=input if inplace else None, s=negative_slope)
