"""Resizing: one program for a tile of rows and columns of one plane of the result."""

import torch
import triton
import triton.language as tl


@triton.jit
def _position(i, ratio, n, MODE: tl.constexpr, ALIGN: tl.constexpr):
    """The pixel before the position, and the position's distance to it."""
    if ALIGN or MODE == 0:
        q = i.to(tl.float32) * ratio
    else:
        q = (i.to(tl.float32) + 0.5) * ratio - 0.5
        if MODE == 1:
            q = tl.maximum(q, 0.0)
    low = tl.floor(q)
    at = low.to(tl.int32)
    return tl.minimum(at, n - 1) if MODE == 0 else at, q - low


@triton.jit
def _weight(t, k: tl.constexpr, MODE: tl.constexpr):
    """Weight of the neighbour k: 0 and 1 linear; -1 to 2 cubic, with a = -0.75."""
    if MODE == 1:
        w = t if k == 1 else 1.0 - t
    else:
        d = t + 1.0 if k == -1 else t if k == 0 else 1.0 - t if k == 1 else 2.0 - t
        if k == 0 or k == 1:
            w = (1.25 * d - 2.25) * d * d + 1.0
        else:
            w = ((-0.75 * d + 3.75) * d - 6.0) * d + 3.0
    return w


@triton.jit
def _resize(x, y, C, H, W, OH, OW, xn, xc, xh, xw, ry, rx, down, across, MODE: tl.constexpr, ALIGN: tl.constexpr,
            BY: tl.constexpr, BX: tl.constexpr):  # fmt: skip
    # One axis of the grid for all: the others of CUDA end at 65535.
    j = tl.program_id(0) % across * BX + tl.arange(0, BX)
    i = tl.program_id(0) // across % down * BY + tl.arange(0, BY)
    plane = (tl.program_id(0) // across // down).to(tl.int64)
    base = x + plane // C * xn + plane % C * xc
    inside = (i < OH)[:, None] & (j < OW)[None, :]
    # Positions end at the border, those beyond the result too: the loads need no mask.
    py, ty = _position(i, ry, H, MODE, ALIGN)
    px, tx = _position(j, rx, W, MODE, ALIGN)
    if MODE == 0:
        result = tl.load(base + (py * xh)[:, None] + (px * xw)[None, :])
    else:
        before: tl.constexpr = 0 if MODE == 1 else 1
        result = tl.zeros((BY, BX), tl.float32)
        for ky in tl.static_range(-before, before + 2):
            row = tl.minimum(tl.maximum(py + ky, 0), H - 1) * xh
            total = tl.zeros((BY, BX), tl.float32)
            for kx in tl.static_range(-before, before + 2):
                column = tl.minimum(tl.maximum(px + kx, 0), W - 1) * xw
                v = tl.load(base + row[:, None] + column[None, :])
                total += v * _weight(tx, kx, MODE)[None, :]
            result += total * _weight(ty, ky, MODE)[:, None]
    tl.store(y + (plane * OH + i[:, None]) * OW + j[None, :], result, mask=inside)


# For small tensors: compiled once for all sizes and strides, the other once more for every kind of them.
_resize_any = triton.jit(_resize.fn, do_not_specialize=[p.name for p in _resize.params if not p.is_constexpr])


def interpolate(input, size=None, scale_factor=None, mode="nearest", align_corners=None):
    N, C, H, W = input.shape
    OH, OW = (int(H * scale_factor), int(W * scale_factor)) if size is None else size
    y = torch.empty((N, C, OH, OW), dtype=input.dtype, device=input.device)
    if y.numel():
        # Within a plane offsets fit in 32 bits.
        x = input if input.stride(2) * H < 2**31 and input.stride(3) * W < 2**31 else input.contiguous()
        ratios = [n / o if scale_factor is None else 1.0 / scale_factor for n, o in ((H, OH), (W, OW))]
        align = bool(align_corners) and mode != "nearest"
        if align:
            ratios = [(n - 1) / (o - 1) if o > 1 else 0.0 for n, o in ((H, OH), (W, OW))]
        BX = min(512, triton.next_power_of_2(OW))
        BY = min(1024 // BX, triton.next_power_of_2(OH))
        kernel = _resize
        if max(input.numel(), y.numel()) < 1 << 17:
            kernel, BX, BY = _resize_any, 32, 16
        down, across = triton.cdiv(OH, BY), triton.cdiv(OW, BX)
        kernel[(N * C * down * across,)](
            x, y, C, H, W, OH, OW, *x.stride(), *ratios, down, across,
            MODE={"nearest": 0, "bilinear": 1, "bicubic": 2}[mode], ALIGN=align, BY=BY, BX=BX,
        )  # fmt: skip
    return y
