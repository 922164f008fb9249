import torch
import triton
import triton.language as tl


@triton.jit
def _chunks(x, means, squares, A, R, L, CHUNKS, BLOCK: tl.constexpr):
    """Mean and sum of squared distances of one chunk of row r of x (A, R, L), which holds A * L numbers."""
    r = (tl.program_id(0) // CHUNKS).to(tl.int64)
    k = tl.program_id(0) % CHUNKS
    q = k.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = q < A * L
    v = tl.load(x + (q // L * R + r) * L + q % L, mask=inside, other=0.0)
    n = tl.minimum(A * L - k * BLOCK, BLOCK).to(tl.float32)
    mean = tl.sum(v, 0) / n
    d = tl.where(inside, v - mean, 0.0)
    tl.store(means + r * CHUNKS + k, mean)
    tl.store(squares + r * CHUNKS + k, tl.sum(d * d, 0))


@triton.jit
def _merge(
    means, squares, running_mean, running_var, out_mean, out_scale, n, CHUNKS, ms, vs, momentum, eps,
    SIZE: tl.constexpr, TRACK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Mean and 1 / sqrt(variance + eps) of a row from its chunks (Chan et al.), and the running statistics."""
    r = tl.program_id(0).to(tl.int64)
    total = tl.zeros((BLOCK,), tl.float32)
    for k0 in range(0, CHUNKS, BLOCK):
        k = k0 + tl.arange(0, BLOCK)
        share = tl.minimum(tl.maximum(n - k * SIZE, 0), SIZE).to(tl.float32) / n
        total += tl.load(means + r * CHUNKS + k, mask=k < CHUNKS, other=0.0) * share
    mean = tl.sum(total, 0)
    total = tl.zeros((BLOCK,), tl.float32)
    for k0 in range(0, CHUNKS, BLOCK):
        k = k0 + tl.arange(0, BLOCK)
        share = tl.minimum(tl.maximum(n - k * SIZE, 0), SIZE).to(tl.float32) / n
        d = tl.load(means + r * CHUNKS + k, mask=k < CHUNKS, other=0.0) - mean
        total += tl.load(squares + r * CHUNKS + k, mask=k < CHUNKS, other=0.0) / n + d * d * share
    var = tl.sum(total, 0)
    tl.store(out_mean + r, mean)
    tl.store(out_scale + r, 1.0 / tl.sqrt_rn(var + eps))
    if TRACK:
        # The running variance is that of a sample: divided by n - 1.
        sample = var * (n / tl.maximum(n - 1, 1).to(tl.float32))
        tl.store(running_mean + r * ms, tl.load(running_mean + r * ms) * (1.0 - momentum) + mean * momentum)
        tl.store(running_var + r * vs, tl.load(running_var + r * vs) * (1.0 - momentum) + sample * momentum)


@triton.jit
def _apply(
    x, y, means, scales, weight, bias, total, R, L, s, t,
    MODE: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """y = activation((x - mean) * scale * weight + bias); the expert's file defines activation(z, where, s, t, MODE)."""
    q = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = q < total
    r = q // L % R
    z = tl.load(x + q, mask=inside) - tl.load(means + r, mask=inside)
    z = z * tl.load(scales + r, mask=inside)
    if WEIGHT:
        z = z * tl.load(weight + r, mask=inside)
    if BIAS:
        z = z + tl.load(bias + r, mask=inside)
    tl.store(y + q, activation(z, q, s, t, MODE), mask=inside)


# For small tensors: compiled once for all sizes and strides, the other once more for every kind of them.
_chunks_any = triton.jit(_chunks.fn, do_not_specialize=[p.name for p in _chunks.params if not p.is_constexpr])
_merge_any = triton.jit(_merge.fn, do_not_specialize=[p.name for p in _merge.params if not p.is_constexpr])
_apply_any = triton.jit(_apply.fn, do_not_specialize=[p.name for p in _apply.params if not p.is_constexpr])


def standardise(
    x, A, R, L, eps, weight=None, bias=None, running=None, momentum=0.0, s=0.0, t=0.0, mode=0, out=None
):  # fmt: skip
    """activation of contiguous x (A, R, L) with the mean and variance of each r taken out; in place without out."""
    new = lambda *size: torch.empty(size, dtype=torch.float32, device=x.device)  # noqa: E731
    y = x if out is None else out
    if x.numel() == 0:
        return y
    few = x.numel() < 1 << 17
    SIZE = min(4096, max(32, triton.next_power_of_2(A * L)))
    SIZE = 1024 if few else SIZE
    chunks, merge, apply = (_chunks_any, _merge_any, _apply_any) if few else (_chunks, _merge, _apply)
    CHUNKS = triton.cdiv(A * L, SIZE)
    means, squares, mean, scale = new(R, CHUNKS), new(R, CHUNKS), new(R), new(R)
    track = running or (mean, scale)
    weight, bias = (None if v is None else v.contiguous() for v in (weight, bias))
    chunks[(R * CHUNKS,)](x, means, squares, A, R, L, CHUNKS, BLOCK=SIZE, num_warps=8 if SIZE > 1024 else 4)
    merge[(R,)](
        means, squares, *track, mean, scale, A * L, CHUNKS, *[v.stride(0) for v in track], momentum, eps,
        SIZE=SIZE, TRACK=running is not None,
        BLOCK=min(1024, max(128 if few else 16, triton.next_power_of_2(CHUNKS))),
    )  # fmt: skip
    apply[(triton.cdiv(x.numel(), 1024),)](
        x, y, mean, scale, x if weight is None else weight, x if bias is None else bias, x.numel(), R, L, s, t, MODE=mode,
        WEIGHT=weight is not None, BIAS=bias is not None, BLOCK=1024, num_warps=8,
    )  # fmt: skip
    return y
