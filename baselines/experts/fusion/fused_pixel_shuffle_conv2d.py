# parts: conv
import triton
import triton.language as tl


@triton.jit
def epilogue(acc, bias, gain, e, where, s, t, MODE: tl.constexpr):
    return acc + bias


def fused_pixel_shuffle_conv2d(input, weight, bias=None, stride=1, padding=0, dilation=1, groups=1, upscale_factor=2):
    return conv(input, weight, bias, stride, padding, dilation, groups, shuffle=upscale_factor)
