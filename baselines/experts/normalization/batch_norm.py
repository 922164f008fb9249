"""Batch normalisation: two-pass statistics per channel, then an elementwise kernel."""

import torch
import triton
import triton.language as tl


@triton.jit
def _statistics(x, mean, var, running_mean, running_var, rm, rv, N, C, S, momentum, BLOCK: tl.constexpr):
    """Two passes over one channel: the variance of values far from zero must not cancel."""
    c = tl.program_id(0)
    count = N * S
    total = tl.zeros((BLOCK,), tl.float32)
    for e0 in range(0, count, BLOCK):
        e = e0 + tl.arange(0, BLOCK)
        where = ((e // S).to(tl.int64) * C + c) * S + e % S
        total += tl.load(x + where, mask=e < count, other=0.0).to(tl.float32)
    mu = tl.sum(total, 0) / count
    square = tl.zeros((BLOCK,), tl.float32)
    for e0 in range(0, count, BLOCK):
        e = e0 + tl.arange(0, BLOCK)
        where = ((e // S).to(tl.int64) * C + c) * S + e % S
        d = tl.where(e < count, tl.load(x + where, mask=e < count, other=0.0).to(tl.float32) - mu, 0.0)
        square += d * d
    spread = tl.sum(square, 0)
    tl.store(mean + c, mu)
    tl.store(var + c, spread / count)
    running_mean += c * rm
    running_var += c * rv
    tl.store(running_mean, (1 - momentum) * tl.load(running_mean) + momentum * mu)
    tl.store(running_var, (1 - momentum) * tl.load(running_var) + momentum * spread / (count - 1))


@triton.jit
def _normalise(
    x,
    y,
    mean,
    var,
    weight,
    bias,
    ms,
    vs,
    ws,
    bs,
    C,
    S,
    eps,
    SCALED: tl.constexpr,
    SHIFTED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    c = row % C
    scale = 1.0 / tl.sqrt(tl.load(var + c * vs) + eps)
    if SCALED:
        scale = scale * tl.load(weight + c * ws)
    mu = tl.load(mean + c * ms)
    s = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    where = row.to(tl.int64) * S + s
    v = (tl.load(x + where, mask=s < S, other=0.0).to(tl.float32) - mu) * scale
    if SHIFTED:
        v += tl.load(bias + c * bs)
    tl.store(y + where, v.to(y.dtype.element_ty), mask=s < S)


# For small tensors: compiled once for all sizes and strides, the other once more for every kind of them.
_statistics_any = triton.jit(
    _statistics.fn, do_not_specialize=[p.name for p in _statistics.params if not p.is_constexpr]
)
_normalise_any = triton.jit(_normalise.fn, do_not_specialize=[p.name for p in _normalise.params if not p.is_constexpr])


def batch_norm(input, running_mean, running_var, weight=None, bias=None, training=False, momentum=0.1, eps=1e-5):
    """In training the statistics kernel also updates the running statistics."""
    x = input.contiguous()
    N, C = x.shape[:2]
    S = 1
    for size in x.shape[2:]:
        S *= size
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    few = x.numel() < 1 << 17
    statistics, normalise = (_statistics_any, _normalise_any) if few else (_statistics, _normalise)
    mean, var = running_mean, running_var
    if training:
        mean = torch.empty((C,), dtype=torch.float32, device=x.device)
        var = torch.empty((C,), dtype=torch.float32, device=x.device)
        old = (running_mean, running_var)
        statistics[(C,)](x, mean, var, *old, *(v.stride(0) for v in old), N, C, S, momentum, BLOCK=1024)
    BLOCK = 256 if few else min(4096, max(16, triton.next_power_of_2(S)))
    vectors = (mean, var, weight if weight is not None else mean, bias if bias is not None else mean)
    normalise[(N * C, triton.cdiv(S, BLOCK))](
        x, y, *vectors, *(v.stride(0) for v in vectors), C, S, eps,
        SCALED=weight is not None, SHIFTED=bias is not None, BLOCK=BLOCK, num_warps=8 if BLOCK >= 2048 else 4,
    )  # fmt: skip
    return y
