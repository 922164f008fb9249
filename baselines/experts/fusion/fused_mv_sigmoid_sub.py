# parts: matvec
import triton
import triton.language as tl


@triton.jit
def epilogue(acc, e, row, s, t, MODE: tl.constexpr):
    return tl.sigmoid(acc) - (s * e + t)


def fused_mv_sigmoid_sub(input, vec, other, alpha=1, *, out=None):
    number = isinstance(other, (int, float))
    y = matvec(input, vec, None if number else other, s=float(alpha), t=float(alpha) * other if number else 0.0)
    return y if out is None else out.copy_(y)
