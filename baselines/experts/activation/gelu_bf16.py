# parts: pointwise, gelu
import triton
import triton.language as tl


@triton.jit
def op(x, s, t, MODE: tl.constexpr):
    return gelu_half(x, MODE)


def gelu_bf16(input, approximate="none"):
    return pointwise(input, mode=approximate == "tanh")
