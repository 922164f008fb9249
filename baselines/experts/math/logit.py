# parts: pointwise
import triton
import triton.language as tl


@triton.jit
def op(x, s, t, MODE: tl.constexpr):
    if MODE:
        x = tl.minimum(tl.maximum(x, s), t)
    return tl.log(x / (1.0 - x))


def logit(input, eps=None, out=None):
    if eps is None:
        return pointwise(input, out=out, bytes=32)
    return pointwise(input, out=out, s=float(eps), t=1.0 - eps, mode=1, bytes=32)
