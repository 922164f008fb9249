# parts: losses
import triton
import triton.language as tl


@triton.jit
def loss(x, t, s, MODE: tl.constexpr):
    return (x - t) * (x - t)


def mse_loss(input, target, reduction="mean"):
    return reduced(input, target, reduction=reduction, divisor=input.numel() if reduction == "mean" else 1)
