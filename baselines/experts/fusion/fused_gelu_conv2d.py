# parts: conv
import triton
import triton.language as tl


@triton.jit
def epilogue(acc, bias, gain, e, where, s, t, MODE: tl.constexpr):
    z = acc + bias
    if MODE == "tanh":
        # z / 2 * (1 + tanh(u)) is z * sigmoid(2 u)
        return z * tl.sigmoid(1.5957691216057308 * (z + 0.044715 * z * z * z))
    return 0.5 * z * (1.0 + tl.erf(z * 0.7071067811865476))


def fused_gelu_conv2d(
    input, weight, bias=None, stride=1, padding=0, dilation=1, groups=1, approximate="none", out=None
):
    return conv(input, weight, bias, stride, padding, dilation, groups, mode=approximate, out=out)
