"""The weighted log-sum-exp of the input as it is, then every element minus it, stored to all its copies."""

import torch
import triton
import triton.language as tl


@triton.jit
def _starts(repeats, starts, n, BLOCK: tl.constexpr):
    """Where the copies of each element begin; starts[n] is the length of the repeated axis."""
    before = tl.zeros((), tl.int64)
    for r0 in range(0, n, BLOCK):
        r = r0 + tl.arange(0, BLOCK)
        count = tl.load(repeats + r, mask=r < n, other=0)
        tl.store(starts + r, before + tl.cumsum(count, 0) - count, mask=r < n)
        before += tl.sum(count, 0)
    tl.store(starts + n, before)


@triton.jit
def _load(x, starts, r, i, end, inner, wide: tl.constexpr, VARIED: tl.constexpr, LONG: tl.constexpr):
    """A tile of values, -inf where they do not count, and how often each row is repeated."""
    inside = (r < end)[:, None] & (i < inner)[None, :]
    at = (r.to(tl.int64) if LONG else r)[:, None] * inner + i[None, :]
    v = tl.load(x + at, mask=inside, other=float("-inf")).to(wide)
    count = (r < end).to(tl.int32)
    if VARIED:
        here = tl.load(starts + r, mask=r < end, other=0)
        count = (tl.load(starts + r + 1, mask=r < end, other=0) - here).to(tl.int32)
        v = tl.where((count > 0)[:, None], v, float("-inf"))
    return v, count


@triton.jit
def _grow(top, total, v, count):
    """Adds a tile to an online log-sum-exp."""
    new = tl.maximum(top, tl.max(v, 0))
    safe = tl.where(new == float("-inf"), 0.0, new)
    part = tl.sum(count[:, None].to(v.dtype) * tl.exp(v - safe[None, :]), 0)
    return new, total * tl.exp(top - safe) + part


@triton.jit
def _scan(x, starts, i, begin, end, inner, wide: tl.constexpr, VARIED: tl.constexpr, LONG: tl.constexpr,
          BN: tl.constexpr, BI: tl.constexpr):  # fmt: skip
    top = tl.full((BI,), float("-inf"), wide)
    total = tl.zeros((BI,), wide)
    for r0 in range(begin, end, BN):
        v, count = _load(x, starts, r0 + tl.arange(0, BN), i, end, inner, wide, VARIED, LONG)
        top, total = _grow(top, total, v, count)
    return top, total


@triton.jit
def _copies(y, v, count, starts, r, i, end, inner, times, VARIED: tl.constexpr, LONG: tl.constexpr, BK: tl.constexpr):
    """Stores a tile to all its places, BK copies at a time."""
    start = (r.to(tl.int64) if LONG else r) * times
    most = times
    if VARIED:
        start = tl.load(starts + r, mask=r < end, other=0).to(start.dtype)
        most = tl.max(count, 0)
    else:
        count = count * times
    k = tl.arange(0, BK)
    for k0 in range(0, most, BK):
        at = (start[:, None, None] + (k0 + k)[None, :, None]) * inner + i[None, None, :]
        inside = ((k0 + k)[None, :] < count[:, None])[:, :, None] & (i < inner)[None, None, :]
        tl.store(y + at, v[:, None, :], mask=inside)


@triton.jit
def _parts(x, starts, tops, totals, n, inner, chunk, splits, wide: tl.constexpr, VARIED: tl.constexpr,
           LONG: tl.constexpr, BN: tl.constexpr, BI: tl.constexpr):  # fmt: skip
    """Maximum and sum of one of ``splits`` chunks of a long axis."""
    tiles = tl.cdiv(inner, BI)
    i = tl.program_id(0) % tiles * BI + tl.arange(0, BI)
    outer = (tl.program_id(0) // tiles).to(tl.int64)
    begin = tl.program_id(1) * chunk
    end = tl.minimum(n, begin + chunk)
    top, total = _scan(x + outer * n * inner, starts, i, begin, end, inner, wide, VARIED, LONG, BN, BI)
    at = (outer * inner + i) * splits + tl.program_id(1)
    tl.store(tops + at, top, mask=i < inner)
    tl.store(totals + at, total, mask=i < inner)


@triton.jit
def _write(x, y, starts, tops, totals, n, inner, times, length, chunk, splits, wide: tl.constexpr, VARIED: tl.constexpr,
           LONG: tl.constexpr, ONCE: tl.constexpr, SPLITS: tl.constexpr, BN: tl.constexpr, BI: tl.constexpr,
           BK: tl.constexpr):  # fmt: skip
    tiles = tl.cdiv(inner, BI)
    i = tl.program_id(0) % tiles * BI + tl.arange(0, BI)
    outer = (tl.program_id(0) // tiles).to(tl.int64)
    x += outer * n * inner
    y += outer * length * inner
    begin = tl.program_id(1) * chunk
    end = tl.minimum(n, begin + chunk)
    if ONCE:
        r = tl.arange(0, BN)
        v, count = _load(x, starts, r, i, n, inner, wide, VARIED, LONG)
        top, total = _grow(tl.full((BI,), float("-inf"), wide), tl.zeros((BI,), wide), v, count)
        lse = top + tl.log(total * times)
        _copies(y, v - lse[None, :], count, starts, r, i, n, inner, times, VARIED, LONG, BK)
    else:
        if SPLITS > 1:
            s = tl.arange(0, SPLITS)
            at = (outer * inner + i[:, None]) * splits + s[None, :]
            inside = (i < inner)[:, None] & (s < splits)[None, :]
            part = tl.load(tops + at, mask=inside, other=float("-inf"))
            top = tl.max(part, 1)
            safe = tl.where(top == float("-inf"), 0.0, top)
            weights = tl.load(totals + at, mask=inside, other=0.0)
            total = tl.sum(weights * tl.exp(part - safe[:, None]), 1)
        else:
            top, total = _scan(x, starts, i, 0, n, inner, wide, VARIED, LONG, BN, BI)
        lse = top + tl.log(total * times)
        for r0 in range(begin, end, BN):
            r = r0 + tl.arange(0, BN)
            v, count = _load(x, starts, r, i, end, inner, wide, VARIED, LONG)
            _copies(y, v - lse[None, :], count, starts, r, i, end, inner, times, VARIED, LONG, BK)


# For small tensors: compiled once for all sizes and strides, the other once more for every kind of them.
_write_any = triton.jit(_write.fn, do_not_specialize=[p.name for p in _write.params if not p.is_constexpr])


def fused_repeat_interleave_log_softmax(input, repeats, dim=None, *, output_size=None, dtype=None, out=None):
    """Works on a contiguous (outer, n, inner) view."""
    x = input.contiguous().view(-1) if dim is None else input.contiguous()
    dim = 0 if dim is None else dim % x.dim()
    outer = inner = 1
    for size in x.shape[:dim]:
        outer *= size
    for size in x.shape[dim + 1 :]:
        inner *= size
    n = x.shape[dim]
    varied = isinstance(repeats, torch.Tensor)
    starts, times, length = x, 1, output_size
    if varied:
        starts = torch.empty((n + 1,), dtype=torch.int64, device=x.device)
        _starts[(1,)](repeats.contiguous(), starts, n, BLOCK=4096, num_warps=8)
        if length is None:
            length = starts[n].item()
    else:
        times, length = repeats, n * repeats
    dtype = dtype or x.dtype
    shape = (*x.shape[:dim], length, *x.shape[dim + 1 :])
    y = torch.empty(shape, dtype=dtype, device=x.device) if out is None or not out.is_contiguous() else out
    if y.numel():
        # Whether one slice is too long for 32-bit offsets.
        LONG = max(n, length) * inner >= 2**31 - 2**16
        wide = tl.float64 if dtype == torch.float64 else tl.float32
        BI = min(32, triton.next_power_of_2(inner))
        BN = min(4096 // BI, triton.next_power_of_2(n))
        # Where copies of an element are neighbours in memory, several are stored at once.
        BK = min(4, triton.next_power_of_2(times)) if inner == 1 and not varied else 1
        few = max(x.numel(), y.numel()) < 1 << 17
        if few:
            BK, (BN, BI) = 1, (512, 1) if inner == 1 else (32, 32)
        columns = triton.cdiv(inner, BI) * outer
        # A few long axes do not fill a GPU: split them and join the sums.
        splits = 1
        if not few and columns < 264 and n >= 4 * BN:
            splits = min(512, 1056 // columns, triton.cdiv(n, 2 * BN))
        chunk = triton.cdiv(triton.cdiv(n, splits), BN) * BN
        splits = triton.cdiv(n, chunk)
        tops = torch.empty((outer * inner * splits,), dtype=dtype, device=x.device)
        totals = torch.empty((outer * inner * splits,), dtype=dtype, device=x.device)
        if splits > 1:
            _parts[(columns, splits)](
                x, starts, tops, totals, n, inner, chunk, splits, wide=wide, VARIED=varied, LONG=LONG, BN=BN,
                BI=BI, num_warps=8,
            )  # fmt: skip
        kernel = _write_any if few else _write
        kernel[(columns, splits)](
            x, y, starts, tops, totals, n, inner, times, length, chunk, splits, wide=wide, VARIED=varied, LONG=LONG,
            ONCE=not few and n <= BN, SPLITS=triton.next_power_of_2(splits), BN=BN, BI=BI, BK=BK,
            num_warps=8 if BN * BI > 1024 else 4,
        )  # fmt: skip
    return y if out is None or out is y else out.copy_(y)
