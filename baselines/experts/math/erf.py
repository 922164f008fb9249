# parts: pointwise
import triton
import triton.language as tl


@triton.jit
def op(x, s, t, MODE: tl.constexpr):
    return tl.erf(x)


def erf(input_tensor):
    return pointwise(input_tensor)
