# parts: losses
import triton
import triton.language as tl


@triton.jit
def loss(x, t, s, MODE: tl.constexpr):
    if MODE:
        return tl.exp(t) * (t - x)
    return tl.where(t > 0.0, t * (tl.log(t) - x), 0.0)


def kl_div(input, target, reduction="batchmean", log_target=False):
    divisor = {"batchmean": input.shape[0], "mean": input.numel()}.get(reduction, 1)
    return reduced(input, target, reduction=reduction, divisor=divisor, mode=int(log_target))
