# parts: gemm
import torch
import triton
import triton.language as tl


@triton.jit
def epilogue(acc, bias, e, f, where, s, t, MODE: tl.constexpr):
    y = tl.sigmoid(acc + bias)
    if MODE:
        # s is the drop probability, t the seed.
        y = tl.where(tl.rand(t, where.to(tl.uint32)) >= s, y / (1.0 - s), 0.0)
    return y


def fused_dropout_sigmoid_linear(input, weight, bias=None, p=0.5, training=True, inplace=False):
    drop = training and p > 0
    seed = torch.randint(0, 2**31 - 1, (1,)).item() | 1 if drop else 0
    return gemm(input, weight.mT, bias, s=float(p), t=seed, mode=int(drop))
