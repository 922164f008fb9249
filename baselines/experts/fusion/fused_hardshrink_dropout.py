"""One elementwise kernel; four elements share one Philox call, of seven rounds (Salmon et al. 2011: they do)."""

import torch
import triton
import triton.language as tl


@triton.jit
def _shrink(v, lambd):
    return tl.where(tl.abs(v) > lambd, v, 0.0)


@triton.jit
def _dropout_hardshrink(x, y, n, seed, p, scale, lambd, DROP: tl.constexpr, BLOCK: tl.constexpr):
    """BLOCK quadruples: element 4 i + k of the tensor takes the k-th number of counter i."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    o = (4 * i)[:, None] + tl.arange(0, 4)[None, :]
    inside = o < n
    v = tl.load(x + o, mask=inside)
    if DROP:
        a, b, c, d = tl.rand4x(seed, i.to(tl.int32), n_rounds=7)
        u = tl.join(tl.join(a, c), tl.join(b, d)).reshape(BLOCK, 4)
        v = tl.where(u >= p, v * scale, 0.0)
    tl.store(y + o, _shrink(v, lambd), mask=inside)


def fused_hardshrink_dropout(input, p=0.5, training=True, inplace=False, lambd=0.5):
    x = input.contiguous()
    y = x if inplace else torch.empty(x.shape, dtype=x.dtype, device=x.device)
    n = x.numel()
    if n:
        drop = bool(training and p > 0)
        seed = torch.randint(0, 2**31 - 1, (1,)).item() | 1 if drop else 0
        scale = 1.0 / (1.0 - p) if p < 1 else 0.0
        _dropout_hardshrink[(triton.cdiv(n, 1024),)](
            x, y, n, seed, float(p), scale, float(lambd), DROP=drop, BLOCK=256, num_warps=4
        )
    if inplace and x.data_ptr() != input.data_ptr():
        input.copy_(x)
    return input if inplace else y
