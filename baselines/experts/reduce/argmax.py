"""Argmax: a tuple reduction of (value, index); long axes are split and the winners reduced again."""

import torch
import triton
import triton.language as tl


@triton.jit
def _better(a, i, b, j):
    """Whether (a, i) beats (b, j): larger, or NaN against a number, or equal and earlier."""
    a_nan, b_nan = a != a, b != b
    equal = (a == b) | (a_nan & b_nan)
    return ((a > b) & (a_nan == b_nan)) | (a_nan & (b_nan == 0)) | (equal & (i < j))


@triton.jit
def _pick(a, i, b, j):
    first = _better(a, i, b, j)
    return tl.where(first, a, b), tl.where(first, i, j)


@triton.jit
def _argmax(
    x, given, values, indices, n, inner, chunk, splits, lowest, LAST: tl.constexpr, BN: tl.constexpr, BI: tl.constexpr
):
    """Argmax over the middle axis of (outer, n, inner), of one of ``splits`` chunks of it."""
    # At most 1024 splits; the axis that may be long is the first, where CUDA's grid has no limit of 65535.
    split = tl.program_id(1)
    tiles = tl.cdiv(inner, BI)
    outer = (tl.program_id(0) // tiles).to(tl.int64)
    i = tl.program_id(0) % tiles * BI + tl.arange(0, BI)
    far = 9223372036854775807
    best = tl.full((BN, BI), lowest, x.dtype.element_ty)
    where = tl.full((BN, BI), far, tl.int64)
    end = tl.minimum(n, (split + 1) * chunk)
    for r0 in range(split * chunk, end, BN):
        r = r0 + tl.arange(0, BN)
        inside = (r[:, None] < end) & (i[None, :] < inner)
        place = (outer * n + r[:, None]) * inner + i[None, :]
        v = tl.load(x + place, mask=inside, other=lowest)
        if LAST:
            at = tl.load(given + place, mask=inside, other=far)
        else:
            at = tl.where(inside, r[:, None].to(tl.int64), far)
        best, where = _pick(v, at, best, where)
    top, index = tl.reduce((best, where), 0, _pick)
    place = (outer * splits + split) * inner + i
    if LAST == 0:
        tl.store(values + place, top, mask=i < inner)
    tl.store(indices + place, index, mask=i < inner)


def argmax(input_tensor, dim, keepdim=False):
    """Works on a contiguous (outer, n, inner) view."""
    x = input_tensor.contiguous()
    dim %= x.dim()
    outer = inner = 1
    for size in x.shape[:dim]:
        outer *= size
    for size in x.shape[dim + 1 :]:
        inner *= size
    n = x.shape[dim]
    shape = (*x.shape[:dim], 1, *x.shape[dim + 1 :])
    result = torch.empty(shape, dtype=torch.int64, device=x.device)
    if result.numel():
        lowest = -(2**63) if x.dtype == torch.int64 else float("-inf")
        BI = min(32, triton.next_power_of_2(inner))
        BN = min(2048 // BI, triton.next_power_of_2(n))
        columns = triton.cdiv(inner, BI)
        # A few long reductions do not fill a GPU: split them and reduce the winners.
        splits = min(triton.cdiv(n, 4 * BN), max(1, 1024 // max(1, outer * columns)))
        chunk = triton.cdiv(triton.cdiv(n, splits), BN) * BN
        values = torch.empty((outer, splits, inner), dtype=x.dtype, device=x.device)
        indices = torch.empty((outer, splits, inner), dtype=torch.int64, device=x.device) if splits > 1 else result
        _argmax[(columns * outer, splits)](
            x, result, values, indices, n, inner, chunk, splits, lowest, LAST=0, BN=BN, BI=BI,
        )  # fmt: skip
        if splits > 1:
            BN = min(2048 // BI, triton.next_power_of_2(splits))
            _argmax[(columns * outer, 1)](
                values, indices, values, result, splits, inner, splits, 1, lowest, LAST=1, BN=BN, BI=BI
            )
    return result if keepdim else result.squeeze(dim)
