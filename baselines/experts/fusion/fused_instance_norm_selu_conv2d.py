# parts: conv, moments
import triton
import triton.language as tl


@triton.jit
def epilogue(acc, bias, gain, e, where, s, t, MODE: tl.constexpr):
    z = acc + bias
    return tl.where(z > 0, 1.0507009873554805 * z, 1.7580993408473766 * (tl.exp(tl.minimum(z, 0.0)) - 1.0))


@triton.jit
def activation(z, where, s, t, MODE: tl.constexpr):
    return z


def fused_instance_norm_selu_conv2d(
    input, weight, bias=None, stride=1, padding=0, dilation=1, groups=1, num_features=None, eps=1e-5, momentum=0.1,
    affine=False, track_running_stats=False,
):  # fmt: skip
    y = conv(input, weight, bias, stride, padding, dilation, groups)
    return standardise(y, 1, y.shape[0] * y.shape[1], y.shape[2] * y.shape[3], eps)
