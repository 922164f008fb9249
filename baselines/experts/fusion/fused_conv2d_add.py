# parts: conv
import triton
import triton.language as tl


@triton.jit
def epilogue(acc, bias, gain, e, where, s, t, MODE: tl.constexpr):
    return acc + bias + s * e + t


def fused_conv2d_add(
    input, weight, bias=None, other=None, stride=1, padding=0, dilation=1, groups=1, alpha=1, out=None
):
    number = isinstance(other, (int, float))
    return conv(
        input, weight, bias, stride, padding, dilation, groups, e=None if number else other, s=float(alpha),
        t=float(alpha) * other if number else 0.0, out=out,
    )  # fmt: skip
