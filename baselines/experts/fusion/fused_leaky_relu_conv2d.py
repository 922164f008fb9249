# parts: conv
import triton
import triton.language as tl


@triton.jit
def epilogue(acc, bias, gain, e, where, s, t, MODE: tl.constexpr):
    z = acc + bias
    return tl.where(z > 0, z, z * s)


def fused_leaky_relu_conv2d(
    input, weight, bias=None, stride=1, padding=0, dilation=1, groups=1, negative_slope=0.01, inplace=False
):
    return conv(input, weight, bias, stride, padding, dilation, groups, s=negative_slope)
