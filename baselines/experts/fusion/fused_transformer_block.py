# parts: gemm, softmax, layer_norm
import torch
import triton
import triton.language as tl


@triton.jit
def epilogue(acc, bias, e, f, where, s, t, MODE: tl.constexpr):
    return acc + e


@triton.jit
def finish(y, where, s, t, MODE: tl.constexpr):
    if MODE:
        # s is the drop probability, t the seed.
        y = tl.where(tl.rand(t, where.to(tl.uint32)) >= s, y / (1.0 - s), 0.0)
    return y


def fused_transformer_block(input, weight1, weight2, residual, dropout_p=0.1, eps=1e-5, *, out=None):
    drop = dropout_p > 0
    seed = torch.randint(0, 2**31 - 1, (1,)).item() | 1 if drop else 0
    z = gemm(input.reshape(-1, input.shape[-1]), weight1)
    softmax_along(z, -1, z, s=float(dropout_p), t=seed, mode=int(drop))
    fresh = out is None or not out.is_contiguous()
    y = torch.empty(residual.shape, dtype=input.dtype, device=input.device) if fresh else out
    L = residual.shape[-1]
    z = gemm(z, weight2, e=residual.reshape(-1, L))
    y = layer_norm_rows(z, L, eps, y)
    return y if out is None or out is y else out.copy_(y)
