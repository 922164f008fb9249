"""One elementwise pass; in training a pass before it sums values and squares around a number near the mean."""

import torch
import triton
import triton.language as tl


@triton.jit
def _sums(x, pivots, sums, N, C, S, tall, long, parts, BN: tl.constexpr, BC: tl.constexpr, BS: tl.constexpr):
    """Per channel the sums of d and d^2, d = x - pivot, over tall images and long places of (N, C, S).

    The pivot, the mean of 16 elements from all over the channel, is near enough to the mean for squares not to cancel.
    """
    c = tl.program_id(0) * BC + tl.arange(0, BC)
    f = tl.arange(0, 16)
    some = ((f % N)[:, None].to(tl.int64) * C + c[None, :]) * S + (f.to(tl.int64) * S // 16)[:, None]
    pivot = tl.sum(tl.load(x + some, mask=(c < C)[None, :], other=0.0), 0) / 16
    tl.store(pivots + c, pivot, mask=(c < C) & (tl.program_id(1) == 0))
    one = tl.zeros((BN, BC, BS), tl.float32)
    two = tl.zeros((BN, BC, BS), tl.float32)
    top, left = tl.program_id(1) // parts * tall, tl.program_id(1) % parts * long
    bottom, right = tl.minimum(N, top + tall), tl.minimum(S, left + long)
    for n0 in range(top, bottom, BN):
        n = n0 + tl.arange(0, BN)
        image = (n[:, None].to(tl.int64) * C + c[None, :]) * S
        wanted = (n < bottom)[:, None] & (c < C)[None, :]
        for s0 in range(left, right, BS):
            s = s0 + tl.arange(0, BS)
            inside = wanted[:, :, None] & (s < right)[None, None, :]
            v = tl.load(x + image[:, :, None] + s[None, None, :], mask=inside, other=0.0)
            d = tl.where(inside, v - pivot[None, :, None], 0.0)
            one += d
            two += d * d
    tl.atomic_add(sums + c, tl.sum(tl.sum(one, 2), 0), mask=c < C)
    tl.atomic_add(sums + C + c, tl.sum(tl.sum(two, 2), 0), mask=c < C)


@triton.jit
def _normalise(x, y, mean, var, sums, weight, bias, ms, vs, ws, bs, N, C, S, count, momentum, eps, TRAINING: tl.constexpr,
               SCALED: tl.constexpr, SHIFTED: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr):  # fmt: skip
    """A tile of the (N, C * S) matrix. In training mean and var are the running ones, pivots stand before the sums."""
    M = C.to(tl.int64) * S
    tiles = tl.cdiv(M, BC).to(tl.int32)
    column = (tl.program_id(0) % tiles).to(tl.int64) * BC + tl.arange(0, BC)
    rows = tl.program_id(0) // tiles * BR
    row = rows + tl.arange(0, BR)
    c = column // S
    valid = column < M
    if TRAINING:
        shift = tl.load(sums + C + c, mask=valid, other=0.0) / count
        square = tl.load(sums + 2 * C + c, mask=valid, other=0.0) / count
        mu = tl.load(sums + c, mask=valid, other=0.0) + shift
        v = tl.maximum(square - shift * shift, 0.0)
        owner = valid & (column % S == 0) & (rows == 0)
        old = tl.load(mean + c * ms, mask=owner)
        tl.store(mean + c * ms, (1 - momentum) * old + momentum * mu, mask=owner)
        old = tl.load(var + c * vs, mask=owner)
        tl.store(var + c * vs, (1 - momentum) * old + momentum * (v * (count / (count - 1))), mask=owner)
    else:
        mu = tl.load(mean + c * ms, mask=valid, other=0.0)
        v = tl.load(var + c * vs, mask=valid, other=1.0)
    scale = 1.0 / tl.sqrt_rn(v + eps)
    if SCALED:
        scale *= tl.load(weight + c * ws, mask=valid, other=0.0)
    at = row[:, None].to(tl.int64) * M + column[None, :]
    inside = (row < N)[:, None] & valid[None, :]
    z = (tl.load(x + at, mask=inside) - mu[None, :]) * scale[None, :]
    if SHIFTED:
        z += tl.load(bias + c * bs, mask=valid, other=0.0)[None, :]
    tl.store(y + at, tl.sigmoid(z), mask=inside)


# For small tensors: compiled once for all sizes and strides, the other once more for every kind of them.
_sums_any = triton.jit(_sums.fn, do_not_specialize=[p.name for p in _sums.params if not p.is_constexpr])
_normalise_any = triton.jit(_normalise.fn, do_not_specialize=[p.name for p in _normalise.params if not p.is_constexpr])


def fused_sigmoid_batch_norm(
    input, running_mean, running_var, weight=None, bias=None, training=False, momentum=0.1, eps=1e-5
):  # fmt: skip
    """One launch, two in training, whose second one also updates the running statistics."""
    x = input.contiguous()
    N, C = x.shape[:2]
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not y.numel():
        return y
    M = x.numel() // N
    S, count = M // C, x.numel() // C
    few = x.numel() < 1 << 17
    sum_up, normalise = (_sums_any, _normalise_any) if few else (_sums, _normalise)
    sums = running_mean
    if training:
        sums = torch.zeros((3 * C,), dtype=x.dtype, device=x.device)
        # Neighbouring threads read neighbours in memory: places of one channel, then channels of one image.
        BS = min(1024, triton.next_power_of_2(S))
        BC = min(max(1, 64 // BS), triton.next_power_of_2(C))
        BN = min(4096 // (BS * BC), triton.next_power_of_2(N))
        if few:
            BS, BC, BN = 64, 4, 4
        grid = triton.cdiv(C, BC)
        # Few channels do not fill a GPU: split the images, then the places.
        wanted = triton.cdiv(1056, grid)
        tall = triton.cdiv(triton.cdiv(N, wanted), BN) * BN
        height = triton.cdiv(N, tall)
        long = triton.cdiv(triton.cdiv(S, triton.cdiv(wanted, height)), BS) * BS
        parts = triton.cdiv(S, long)
        sum_up[(grid, height * parts)](x, sums, sums[C:], N, C, S, tall, long, parts, BN=BN, BC=BC, BS=BS, num_warps=8)
    BC = min(1024, triton.next_power_of_2(M))
    BR = min(4096 // BC, triton.next_power_of_2(N))
    if few:
        BC, BR = 256, 4
    affine = tuple(v if v is not None else running_mean for v in (weight, bias))
    normalise[(triton.cdiv(M, BC) * triton.cdiv(N, BR),)](
        x, y, running_mean, running_var, sums, *affine, running_mean.stride(0), running_var.stride(0),
        *(v.stride(0) for v in affine), N, C, S, count, float(momentum), float(eps), TRAINING=training, SCALED=weight is not None,
        SHIFTED=bias is not None, BR=BR, BC=BC, num_warps=8 if BR * BC >= 2048 else 4,
    )  # fmt: skip
    return y
