import torch
import triton
import triton.language as tl


@triton.jit
def _total(loss, share, out, n, divisor, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr):
    total = tl.zeros((BLOCK,), tl.float32)
    weights = tl.zeros((BLOCK,), tl.float32)
    for e0 in range(0, n, BLOCK):
        e = e0 + tl.arange(0, BLOCK)
        total += tl.load(loss + e, mask=e < n, other=0.0)
        if WEIGHTED:
            weights += tl.load(share + e, mask=e < n, other=0.0)
    if WEIGHTED:
        tl.store(out, tl.sum(total, 0) / tl.sum(weights, 0))
    else:
        tl.store(out, tl.sum(total, 0) / divisor)


def total(loss, share=None, divisor=1, out=None):
    """Sum of the programs' partial sums, divided by the sum of their shares where given, else by divisor: 0-d."""
    if out is None:
        out = torch.empty((), dtype=loss.dtype, device=loss.device)
    weighted = share is not None
    _total[(1,)](
        loss, share if weighted else loss, out, loss.numel(), divisor, WEIGHTED=weighted, BLOCK=8192, num_warps=16
    )
    return out
