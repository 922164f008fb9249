"""Affine map and sampling in one kernel: a tile of pixels of one image, a loop over the channels."""

import torch
import triton
import triton.language as tl


@triton.jit
def _base(i, n, ALIGN: tl.constexpr):
    """The points -1 .. 1 of an axis of n pixels."""
    # A size of 1 arrives as a constant, which has no .to().
    n = tl.cast(n, tl.float32)
    i = i.to(tl.float32)
    if ALIGN:
        u = tl.where(n > 1.0, (2.0 * i - (n - 1.0)) / tl.maximum(n - 1.0, 1.0), 0.0)
    else:
        u = (2.0 * i + 1.0 - n) / n
    return u


@triton.jit
def _pixel(g, size, PADDING: tl.constexpr, ALIGN: tl.constexpr):
    """Normalised position -> pixel position, after padding."""
    size = tl.cast(size, tl.float32)
    if ALIGN:
        at = (g + 1.0) * 0.5 * (size - 1.0)
    else:
        at = ((g + 1.0) * size - 1.0) * 0.5
    if PADDING == 2:
        low = 0.0 if ALIGN else -0.5
        span = size - 1.0 if ALIGN else size
        away = tl.abs(at - low)
        turns = tl.floor(away / tl.where(span > 0, span, 1.0))
        rest = away - turns * span
        odd = turns - 2.0 * tl.floor(turns * 0.5)
        at = tl.where(odd == 0.0, rest, span - rest) + low
        at = tl.where(span > 0, at, 0.0)
    if PADDING >= 1:
        at = tl.minimum(tl.maximum(at, 0.0), size - 1.0)
    return at


@triton.jit
def _nearest(v):
    """Round half to even."""
    r = tl.floor(v + 0.5)
    odd = r - 2.0 * tl.floor(r * 0.5)
    return tl.where((r - v == 0.5) & (odd != 0.0), r - 1.0, r)


@triton.jit
def _sample(x, theta, y, C, H, W, OH, OW, xn, xc, xh, xw, down, across, NEAREST: tl.constexpr, PADDING: tl.constexpr,
            ALIGN: tl.constexpr, BY: tl.constexpr, BX: tl.constexpr):  # fmt: skip
    # One axis of the grid for all: the others of CUDA end at 65535.
    j = (tl.program_id(0) % across * BX + tl.arange(0, BX))[None, :]
    i = (tl.program_id(0) // across % down * BY + tl.arange(0, BY))[:, None]
    n = (tl.program_id(0) // across // down).to(tl.int64)
    inside = (i < OH) & (j < OW)
    u, v = _base(j, OW, ALIGN), _base(i, OH, ALIGN)
    t = theta + n * 6
    gx = tl.load(t).to(tl.float32) * u + tl.load(t + 1).to(tl.float32) * v + tl.load(t + 2).to(tl.float32)
    gy = tl.load(t + 3).to(tl.float32) * u + tl.load(t + 4).to(tl.float32) * v + tl.load(t + 5).to(tl.float32)
    px, py = _pixel(gx, W, PADDING, ALIGN), _pixel(gy, H, PADDING, ALIGN)
    if NEAREST:
        px, py = _nearest(px), _nearest(py)
    fx, fy = tl.floor(px), tl.floor(py)
    # Far outside positions must not overflow the integers; anything beyond one pixel reads as outside anyway.
    ix = tl.minimum(tl.maximum(fx, -2.0), W + 1.0).to(tl.int32)
    iy = tl.minimum(tl.maximum(fy, -2.0), H + 1.0).to(tl.int32)
    tx, ty = px - fx, py - fy
    here = y + (n * C * OH + i) * OW + j
    for c in range(C):
        base = x + n * xn + c * xc
        total = tl.zeros((BY, BX), tl.float32)
        for corner in tl.static_range(0, 1 if NEAREST else 4):
            # corner counts the neighbours in binary: bit 0 is x, bit 1 is y
            cx, cy = ix + corner % 2, iy + corner // 2
            seen = inside & (cx >= 0) & (cx < W) & (cy >= 0) & (cy < H)
            value = tl.load(base + cy.to(tl.int64) * xh + cx.to(tl.int64) * xw, mask=seen, other=0.0)
            if NEAREST == 0:
                value *= (tx if corner % 2 else 1.0 - tx) * (ty if corner // 2 else 1.0 - ty)
            total += value
        tl.store(here + c.to(tl.int64) * OH * OW, total, mask=inside)


# For small tensors: compiled once for all sizes and strides, the other once more for every kind of them.
_sample_any = triton.jit(_sample.fn, do_not_specialize=[p.name for p in _sample.params if not p.is_constexpr])


def grid_sample_with_affine(input, theta, size, mode="bilinear", padding_mode="zeros", align_corners=False):
    C, H, W = input.shape[1:]
    N, _, OH, OW = size
    y = torch.empty(size, dtype=input.dtype, device=input.device)
    if y.numel():
        BX = min(32, triton.next_power_of_2(OW))
        BY = min(256 // BX, triton.next_power_of_2(OH))
        kernel = _sample
        if max(input.numel(), y.numel()) < 1 << 17:
            kernel, BX, BY = _sample_any, 32, 8
        down, across = triton.cdiv(OH, BY), triton.cdiv(OW, BX)
        padding = {"zeros": 0, "border": 1, "reflection": 2}[padding_mode]
        kernel[(N * down * across,)](
            input, theta.contiguous(), y, C, H, W, OH, OW, *input.stride(), down, across,
            NEAREST=int(mode == "nearest"), PADDING=padding, ALIGN=bool(align_corners), BY=BY, BX=BX,
        )  # fmt: skip
    return y
