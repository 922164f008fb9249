# parts: matvec, softmax
import torch
import triton
import triton.language as tl


@triton.jit
def epilogue(acc, e, row, s, t, MODE: tl.constexpr):
    return acc


@triton.jit
def finish(y, where, s, t, MODE: tl.constexpr):
    if MODE:
        # s is the drop probability, t the seed.
        y = tl.where(tl.rand(t, where.to(tl.uint32)) >= s, y / (1.0 - s), 0.0)
    return y


def fused_mv_logsoftmax_dropout(input, vec, p=0.5, training=True, inplace=False, dim=0, *, out=None):
    fresh = out is None or not out.is_contiguous()
    y = torch.empty(input.shape[0], dtype=input.dtype, device=input.device) if fresh else out
    z = matvec(input, vec, dtype=torch.float32)
    drop = training and p > 0
    seed = torch.randint(0, 2**31 - 1, (1,)).item() | 1 if drop else 0
    few = input.numel() < 1 << 17
    y = softmax_along(z, 0, y, log=True, s=float(p), t=seed, mode=int(drop), few=few)
    return y if out is None or out is y else out.copy_(y)
