# parts: losses
import triton
import triton.language as tl
from triton.language.extra import libdevice


@triton.jit
def loss(p, t, s, MODE: tl.constexpr):
    return (t - 1.0) * tl.maximum(libdevice.log1p(-p), -100.0) - t * tl.maximum(tl.log(p), -100.0)


def binary_cross_entropy(input, target, weight=None, reduction="mean"):
    return reduced(input, target, weight, reduction=reduction, divisor=input.numel() if reduction == "mean" else 1)
