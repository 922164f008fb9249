# parts: conv, moments
import triton
import triton.language as tl


@triton.jit
def epilogue(acc, bias, gain, e, where, s, t, MODE: tl.constexpr):
    return acc + bias


@triton.jit
def activation(z, where, s, t, MODE: tl.constexpr):
    return z * tl.sigmoid(z)


def fused_silu_layer_norm_conv2d(
    x, weight, conv_weight, conv_bias=None, conv_stride=1, conv_padding=0, conv_dilation=1, conv_groups=1, ln_eps=1e-5
):
    y = conv(x, conv_weight, conv_bias, conv_stride, conv_padding, conv_dilation, conv_groups)
    return standardise(y, 1, y.shape[0], y.shape[1] * y.shape[2] * y.shape[3], ln_eps)
