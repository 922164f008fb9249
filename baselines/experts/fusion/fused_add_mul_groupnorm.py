# parts: welford
"""Two launches: statistics of every piece of a group, then a pass that joins the pieces and normalises.

The product is never stored. The second pass runs backwards: what was read last is still in the L2 cache.
"""

import torch
import triton
import triton.language as tl


@triton.jit
def _statistics(
    x, w, mean, square, count, C, S, G, D, wn, wc, ws, chunk, splits, FULL: tl.constexpr, BLOCK: tl.constexpr
):
    """Mean, squared deviations and count of one piece of one group, which is D * S neighbours in memory."""
    group = tl.program_id(0) // splits
    begin = tl.program_id(0) % splits * chunk
    end = tl.minimum(D * S, begin + chunk)
    n = (group // G).to(tl.int64)
    m = tl.zeros((BLOCK,), tl.float32)
    q = tl.zeros((BLOCK,), tl.float32)
    k = tl.zeros((BLOCK,), tl.float32)
    for e0 in range(begin, end, BLOCK):
        e = e0 + tl.arange(0, BLOCK)
        inside = e < end
        at = group.to(tl.int64) * D * S + e
        if FULL:
            other = at
        else:
            other = n * wn + (group % G * D + e // S).to(tl.int64) * wc + e % S * ws
        b = tl.load(w + other, mask=inside, other=0.0)
        z = (tl.load(x + at, mask=inside, other=0.0) + b) * b
        m, q, k = another(m, q, k, z, inside)
    m, q, k = tl.reduce((m, q, k), 0, combine)
    tl.store(mean + tl.program_id(0), m)
    tl.store(square + tl.program_id(0), q)
    tl.store(count + tl.program_id(0), k)


@triton.jit
def _normalise(
    x, w, weight, bias, y, mean, square, count, rows, C, S, D, wn, wc, ws, splits, eps, SCALED: tl.constexpr,
    SHIFTED: tl.constexpr, PIECES: tl.constexpr, BR: tl.constexpr, BS: tl.constexpr,
):  # fmt: skip
    """BR rows (sample, channel) by BS positions."""
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    tiles = tl.cdiv(S, BS)
    r = tile // tiles * BR + tl.arange(0, BR)
    s = tile % tiles * BS + tl.arange(0, BS)
    c = r % C
    piece = (r // D)[None, :] * splits + tl.arange(0, PIECES)[:, None]
    there = (r < rows)[None, :] & (tl.arange(0, PIECES) < splits)[:, None]
    m, q, k = tl.reduce((
        tl.load(mean + piece, mask=there, other=0.0), tl.load(square + piece, mask=there, other=0.0),
        tl.load(count + piece, mask=there, other=0.0),
    ), 0, combine)  # fmt: skip
    scale = 1.0 / tl.sqrt(q / tl.maximum(k, 1.0) + eps)
    if SCALED:
        scale *= tl.load(weight + c)
    inside = (r < rows)[:, None] & (s < S)[None, :]
    at = r.to(tl.int64)[:, None] * S + s[None, :]
    other = ((r // C).to(tl.int64) * wn + c.to(tl.int64) * wc)[:, None] + (s * ws)[None, :]
    b = tl.load(w + other, mask=inside, other=0.0)
    z = (tl.load(x + at, mask=inside, other=0.0) + b) * b
    z = (z - m[:, None]) * scale[:, None]
    if SHIFTED:
        z += tl.load(bias + c)[:, None]
    tl.store(y + at, z, mask=inside)


# For small tensors: compiled once for all sizes and strides, the other once more for every kind of them.
_statistics_any = triton.jit(
    _statistics.fn, do_not_specialize=[p.name for p in _statistics.params if not p.is_constexpr]
)
_normalise_any = triton.jit(_normalise.fn, do_not_specialize=[p.name for p in _normalise.params if not p.is_constexpr])


def _spatial_stride(w):
    """The one stride of all axes after the second (0: they are broadcast), or None where there is none."""
    dense, flat, size = True, True, 1
    for n, stride in zip(reversed(w.shape[2:]), reversed(w.stride()[2:])):
        if n > 1:
            dense, flat = dense and stride == size, flat and stride == 0
        size *= n
    return 0 if flat else 1 if dense else None


def fused_add_mul_groupnorm(input1, input2, weight, bias, num_groups, eps=1e-5, *, out=None):
    x = input1.contiguous()
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
    target = y if y.is_contiguous() else torch.empty(x.shape, dtype=x.dtype, device=x.device)
    N, C = x.shape[:2]
    rows = N * C
    if x.numel():
        S, D, groups = x.numel() // rows, C // num_groups, N * num_groups
        w = input2.expand(x.shape)
        ws = _spatial_stride(w)
        if ws is None:
            w, ws = w.contiguous(), 1
        wn, wc = w.stride(0), w.stride(1)
        splits = max(1, min(64, triton.cdiv(1056, groups), D * S // 8192))
        chunk = triton.cdiv(triton.cdiv(D * S, splits), 4096) * 4096
        splits = triton.cdiv(D * S, chunk)
        mean, square, count = (torch.empty((groups * splits,), dtype=x.dtype, device=x.device) for _ in range(3))
        BLOCK = min(4096, max(256, triton.next_power_of_2(D * S)))
        few = x.numel() < 1 << 17
        statistics, normalise = (_statistics_any, _normalise_any) if few else (_statistics, _normalise)
        BLOCK = 1024 if few else BLOCK
        statistics[(groups * splits,)](
            x, w, mean, square, count, C, S, num_groups, D, wn, wc, ws, chunk, splits, FULL=not few and w.is_contiguous(),
            BLOCK=BLOCK, num_warps=8 if BLOCK >= 2048 else 4,
        )  # fmt: skip
        BS = min(4096, triton.next_power_of_2(S))
        BR = min(4096 // BS, triton.next_power_of_2(rows))
        if few:
            BS, BR = 64, 16
        normalise[(triton.cdiv(rows, BR) * triton.cdiv(S, BS),)](
            x, w, x if weight is None else weight.contiguous(), x if bias is None else bias.contiguous(), target, mean,
            square, count, rows, C, S, D, wn, wc, ws, splits, eps, SCALED=weight is not None, SHIFTED=bias is not None,
            PIECES=max(16 if few else 1, triton.next_power_of_2(splits)), BR=BR, BS=BS, num_warps=8 if BR * BS >= 2048 else 4,
        )  # fmt: skip
    if target is not y:
        y.copy_(target)
    return y
