# parts: conv, moments
import torch
import triton
import triton.language as tl


@triton.jit
def epilogue(acc, bias, gain, e, where, s, t, MODE: tl.constexpr):
    return acc + bias


@triton.jit
def activation(z, where, s, t, MODE: tl.constexpr):
    z = tl.maximum(z, 0.0)
    if MODE:
        # s is the drop probability, t the seed.
        z = tl.where(tl.rand(t, where.to(tl.uint32)) >= s, z / (1.0 - s), 0.0)
    return z


def fused_dropout_relu_batch_norm_conv2d(
    input, weight, bias=None, stride=1, padding=0, dilation=1, groups=1, p=0.5, training=True, inplace=False
):
    y = conv(input, weight, bias, stride, padding, dilation, groups)
    N, C, H, W = y.shape
    drop = training and p > 0
    seed = torch.randint(0, 2**31 - 1, (1,)).item() | 1 if drop else 0
    return standardise(y, N, C, H * W, 1e-5, s=float(p), t=seed, mode=int(drop))
