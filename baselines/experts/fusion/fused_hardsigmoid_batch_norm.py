# parts: welford
"""One launch with running statistics; in training a first one takes the statistics of every piece of a channel.

The second pass joins the pieces itself, and runs backwards: what was read last is still in the L2 cache.
"""

import torch
import triton
import triton.language as tl


@triton.jit
def _statistics(x, mean, square, count, N, C, S, chunk, splits, BN: tl.constexpr, BS: tl.constexpr):
    """Mean, squared deviations and count of one piece (chunk tiles of BN samples by BS positions) of one channel."""
    c = tl.program_id(0) // splits
    tiles = tl.cdiv(S, BS)
    begin = tl.program_id(0) % splits * chunk
    m = tl.zeros((BN, BS), tl.float32)
    q = tl.zeros((BN, BS), tl.float32)
    k = tl.zeros((BN, BS), tl.float32)
    for tile in range(begin, tl.minimum(begin + chunk, tiles * tl.cdiv(N, BN))):
        n = tile // tiles * BN + tl.arange(0, BN)
        s = tile % tiles * BS + tl.arange(0, BS)
        inside = (n < N)[:, None] & (s < S)[None, :]
        v = tl.load(x + (n.to(tl.int64)[:, None] * C + c) * S + s[None, :], mask=inside, other=0.0)
        m, q, k = another(m, q, k, v, inside)
    m, q, k = tl.reduce((tl.reshape(m, (BN * BS,)), tl.reshape(q, (BN * BS,)), tl.reshape(k, (BN * BS,))), 0, combine)
    tl.store(mean + tl.program_id(0), m)
    tl.store(square + tl.program_id(0), q)
    tl.store(count + tl.program_id(0), k)


@triton.jit
def _normalise(
    x, y, running_mean, running_var, weight, bias, mean, square, count, rows, C, S, ms, vs, splits, momentum, eps,
    TRAIN: tl.constexpr, SCALED: tl.constexpr, SHIFTED: tl.constexpr, PIECES: tl.constexpr, BR: tl.constexpr,
    BS: tl.constexpr,
):  # fmt: skip
    """BR rows (sample, channel) by BS positions."""
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    tiles = tl.cdiv(S, BS)
    r = tile // tiles * BR + tl.arange(0, BR)
    s = tile % tiles * BS + tl.arange(0, BS)
    c = r % C
    if TRAIN:
        piece = c[None, :] * splits + tl.arange(0, PIECES)[:, None]
        there = (r < rows)[None, :] & (tl.arange(0, PIECES) < splits)[:, None]
        mu, q, k = tl.reduce((
            tl.load(mean + piece, mask=there, other=0.0), tl.load(square + piece, mask=there, other=0.0),
            tl.load(count + piece, mask=there, other=0.0),
        ), 0, combine)  # fmt: skip
        var = q / tl.maximum(k, 1.0)
        # The first tile of the first sample's rows keeps the books.
        first = (r < C) & (tile % tiles == 0)
        old = tl.load(running_mean + c * ms, mask=first, other=0.0)
        tl.store(running_mean + c * ms, (1 - momentum) * old + momentum * mu, mask=first)
        old = tl.load(running_var + c * vs, mask=first, other=0.0)
        tl.store(running_var + c * vs, (1 - momentum) * old + momentum * (q / tl.maximum(k - 1, 1.0)), mask=first)
    else:
        mu, var = tl.load(running_mean + c * ms), tl.load(running_var + c * vs)
    scale = 1.0 / tl.sqrt(var + eps)
    if SCALED:
        scale *= tl.load(weight + c)
    inside = (r < rows)[:, None] & (s < S)[None, :]
    at = r.to(tl.int64)[:, None] * S + s[None, :]
    z = (tl.load(x + at, mask=inside, other=0.0) - mu[:, None]) * scale[:, None]
    if SHIFTED:
        z += tl.load(bias + c)[:, None]
    tl.store(y + at, tl.minimum(tl.maximum(z * (1.0 / 6.0) + 0.5, 0.0), 1.0), mask=inside)


def fused_hardsigmoid_batch_norm(
    x, running_mean, running_var, weight=None, bias=None, training=False, momentum=0.1, eps=1e-5, inplace=False
):
    x = x.contiguous()
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    N, C = x.shape[:2]
    rows = N * C
    if x.numel():
        S = x.numel() // rows
        BS = min(4096, triton.next_power_of_2(S))
        mean = square = count = x
        splits = 1
        if training:
            BN = min(4096 // BS, triton.next_power_of_2(N))
            tiles = triton.cdiv(S, BS) * triton.cdiv(N, BN)
            chunk = triton.cdiv(tiles, max(1, min(64, triton.cdiv(1056, C), tiles // 2)))
            splits = triton.cdiv(tiles, chunk)
            mean, square, count = (torch.empty((C * splits,), dtype=x.dtype, device=x.device) for _ in range(3))
            _statistics[(C * splits,)](
                x, mean, square, count, N, C, S, chunk, splits, BN=BN, BS=BS, num_warps=8 if BN * BS >= 2048 else 4
            )
        BR = min(4096 // BS, triton.next_power_of_2(rows))
        _normalise[(triton.cdiv(rows, BR) * triton.cdiv(S, BS),)](
            x, y, running_mean, running_var, x if weight is None else weight.contiguous(),
            x if bias is None else bias.contiguous(), mean, square, count, rows, C, S, running_mean.stride(0),
            running_var.stride(0), splits, momentum, eps, TRAIN=training, SCALED=weight is not None,
            SHIFTED=bias is not None, PIECES=triton.next_power_of_2(splits), BR=BR, BS=BS,
            num_warps=8 if BR * BS >= 2048 else 4,
        )  # fmt: skip
    return y
