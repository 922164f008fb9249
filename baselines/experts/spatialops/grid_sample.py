"""Grid sampling: one program for a block of positions, a loop over the channels."""

import torch
import triton
import triton.language as tl


@triton.jit
def _pixel(g, size, PADDING: tl.constexpr, ALIGN: tl.constexpr):
    """Normalised position -> pixel position, after padding."""
    # A size of 1 arrives as a constant, which has no .to().
    size = tl.cast(size, tl.float32)
    if ALIGN:
        at = (g + 1.0) * 0.5 * (size - 1.0)
    else:
        at = ((g + 1.0) * size - 1.0) * 0.5
    if PADDING == 2:
        if ALIGN:
            low = 0.0
            span = size - 1.0
        else:
            low = -0.5
            span = size
        away = tl.abs(at - low)
        turns = tl.floor(away / tl.where(span > 0, span, 1.0))
        rest = away - turns * span
        odd = turns - 2.0 * tl.floor(turns * 0.5)
        at = tl.where(odd == 0.0, rest + low, span - rest + low)
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
def _sample(
    x,
    grid,
    y,
    pixels,
    C,
    D,
    H,
    W,
    xn,
    xc,
    xd,
    xh,
    xw,
    per_image,
    CUBE: tl.constexpr,
    NEAREST: tl.constexpr,
    PADDING: tl.constexpr,
    ALIGN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    e = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    valid = e < pixels
    n = (e // per_image).to(tl.int64)
    dims: tl.constexpr = 3 if CUBE else 2
    px = _pixel(tl.load(grid + e.to(tl.int64) * dims, mask=valid, other=0.0), W, PADDING, ALIGN)
    py = _pixel(tl.load(grid + e.to(tl.int64) * dims + 1, mask=valid, other=0.0), H, PADDING, ALIGN)
    pz = tl.zeros((BLOCK,), tl.float32)
    if CUBE:
        pz = _pixel(tl.load(grid + e.to(tl.int64) * dims + 2, mask=valid, other=0.0), D, PADDING, ALIGN)
    if NEAREST:
        px, py, pz = _nearest(px), _nearest(py), _nearest(pz)
    fx, fy, fz = tl.floor(px), tl.floor(py), tl.floor(pz)
    # Far outside positions must not overflow the integers; anything beyond one pixel reads as outside anyway.
    ix = tl.minimum(tl.maximum(fx, -2.0), W + 1.0).to(tl.int32)
    iy = tl.minimum(tl.maximum(fy, -2.0), H + 1.0).to(tl.int32)
    iz = tl.minimum(tl.maximum(fz, -2.0), D + 1.0).to(tl.int32)
    for c in range(C):
        total = tl.zeros((BLOCK,), tl.float32)
        for corner in tl.static_range(0, 8 if CUBE else 4):
            if NEAREST == 0 or corner == 0:
                # corner counts the neighbours in binary: bit 0 is x, bit 1 is y, bit 2 is z
                cx, cy, cz = ix + corner % 2, iy + corner // 2 % 2, iz + corner // 4
                inside = valid & (cx >= 0) & (cx < W) & (cy >= 0) & (cy < H) & (cz >= 0) & (cz < D)
                where = n * xn + c * xc + cz.to(tl.int64) * xd + cy.to(tl.int64) * xh + cx.to(tl.int64) * xw
                v = tl.load(x + where, mask=inside, other=0.0)
                if NEAREST == 0:
                    wx = px - fx if corner % 2 else 1.0 - (px - fx)
                    wy = py - fy if corner // 2 % 2 else 1.0 - (py - fy)
                    wz = pz - fz if corner // 4 else 1.0 - (pz - fz)
                    v *= wx * wy * wz
                total += v
        tl.store(y + (n * C + c) * per_image + e % per_image, total, mask=valid)


# For small tensors: compiled once for all sizes and strides, the other once more for every kind of them.
_sample_any = triton.jit(_sample.fn, do_not_specialize=[p.name for p in _sample.params if not p.is_constexpr])


def grid_sample(input, grid, mode="bilinear", padding_mode="zeros", align_corners=False):
    """A 4-D image is a 5-D one of depth 1; the third coordinate is then unused."""
    cube = input.dim() == 5
    x = input if cube else input.unsqueeze(2)
    N, C, D, H, W = x.shape
    g = grid.contiguous()
    spots = g.shape[1:-1]
    y = torch.empty((N, C, *spots), dtype=input.dtype, device=input.device)
    if y.numel():
        per_image = y.numel() // (N * C)
        pixels = N * per_image
        padding = {"zeros": 0, "border": 1, "reflection": 2}[padding_mode]
        kernel = _sample_any if max(x.numel(), y.numel()) < 1 << 17 else _sample
        kernel[(triton.cdiv(pixels, 256),)](
            x, g, y, pixels, C, D, H, W, *x.stride(), per_image,
            CUBE=cube, NEAREST=int(mode == "nearest"), PADDING=padding, ALIGN=bool(align_corners), BLOCK=256,
        )  # fmt: skip
    return y
