# parts: total
"""One kernel reads both inputs once (nothing normalised is stored); a second adds the programs' partial sums."""

import torch
import triton
import triton.language as tl


@triton.jit
def _losses(a, b, target, y, N, D, an, ad, bn, bd, ts, margin, ROWS: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr):
    n = tl.program_id(0).to(tl.int64) * BN + tl.arange(0, BN)
    ab = tl.zeros((BN, BD), tl.float32)
    aa = tl.zeros((BN, BD), tl.float32)
    bb = tl.zeros((BN, BD), tl.float32)
    for d0 in range(0, D, BD):
        d = d0 + tl.arange(0, BD)
        inside = (n < N)[:, None] & (d < D)[None, :]
        v = tl.load(a + n[:, None] * an + d[None, :] * ad, mask=inside, other=0.0)
        w = tl.load(b + n[:, None] * bn + d[None, :] * bd, mask=inside, other=0.0)
        ab += v * w
        aa += v * v
        bb += w * w
    # A ratio for each: the product of the lengths could overflow.
    c = tl.sum(ab, 1) / tl.maximum(tl.sqrt(tl.sum(aa, 1)), 1e-12) / tl.maximum(tl.sqrt(tl.sum(bb, 1)), 1e-12)
    t = tl.load(target + n * ts, mask=n < N, other=1)
    loss = tl.where(n < N, tl.where(t > 0, 1.0 - c, tl.maximum(c - margin, 0.0)), 0.0)
    if ROWS:
        tl.store(y + n, loss, mask=n < N)
    else:
        tl.store(y + tl.program_id(0), tl.sum(loss, 0))


# For small tensors: compiled once for all sizes and strides, the other once more for every kind of them.
_losses_any = triton.jit(_losses.fn, do_not_specialize=[p.name for p in _losses.params if not p.is_constexpr])


def fused_cosine_embedding_loss_with_normalization(input1, input2, target, margin=0, reduction="mean"):
    N, D = input1.shape
    rows = reduction == "none"
    BD = min(512, triton.next_power_of_2(D))
    BN = min(2048 // BD, triton.next_power_of_2(max(1, N)))
    few = input1.numel() < 1 << 17
    if few:
        BN, BD = 8, 128
    programs = triton.cdiv(N, BN)
    y = torch.empty((N if rows else programs,), dtype=input1.dtype, device=input1.device)
    if N:
        kernel = _losses_any if few else _losses
        kernel[(programs,)](
            input1, input2, target, y, N, D, *input1.stride(), *input2.stride(), target.stride(0), float(margin),
            ROWS=rows, BN=BN, BD=BD, num_warps=4,
        )  # fmt: skip
    return y if rows else total(y, divisor=N if reduction == "mean" else 1)
