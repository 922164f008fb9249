# parts: pointwise
import triton
import triton.language as tl


@triton.jit
def op(x, s, t, MODE: tl.constexpr):
    if MODE:
        return tl.floor(x)
    else:
        return x


def floor(input, out=None):
    return pointwise(input, out=out, mode=int(input.dtype.is_floating_point))
