# parts: pointwise
import triton
import triton.language as tl


@triton.jit
def op(x, s, t, MODE: tl.constexpr):
    # This way round NaN is kept.
    return tl.where(x <= 0.0, 0.0, x)


def relu(input, inplace=False):
    return pointwise(input, out=input if inplace else None)
