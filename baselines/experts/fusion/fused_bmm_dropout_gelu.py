# parts: gemm
import torch
import triton
import triton.language as tl


@triton.jit
def epilogue(acc, bias, e, f, where, s, t, MODE: tl.constexpr):
    # MODE is (dropout?, tanh?); s is the drop probability, t the seed.
    if MODE[0]:
        acc = tl.where(tl.rand(t, where.to(tl.uint32)) >= s, acc / (1.0 - s), 0.0)
    if MODE[1]:
        return acc * tl.sigmoid(1.5957691216057308 * (acc + 0.044715 * acc * acc * acc))
    return 0.5 * acc * (1.0 + tl.erf(acc * 0.7071067811865476))


def fused_bmm_dropout_gelu(input1, input2, p=0.5, training=True, inplace=False, approximate="none", *, out=None):
    drop = training and p > 0
    seed = torch.randint(0, 2**31 - 1, (1,)).item() | 1 if drop else 0
    return gemm(input1, input2, out=out, s=float(p), t=seed, mode=(drop, approximate == "tanh"))
