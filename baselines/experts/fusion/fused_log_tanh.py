# parts: pointwise
import triton
import triton.language as tl


@triton.jit
def op(x, s, t, MODE: tl.constexpr):
    # tanh(log x) = (x^2 - 1) / (x^2 + 1), factored so that it keeps its digits near 1. Beyond 1e9 it is 1, and the
    # square of 1e20 would overflow.
    x = tl.minimum(x, 1e9)
    return (x - 1.0) * (x + 1.0) / (x * x + 1.0)


def fused_log_tanh(input, out=None):
    return pointwise(input, out=out)
