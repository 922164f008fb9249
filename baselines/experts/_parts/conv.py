import torch
import triton
import triton.language as tl


@triton.jit
def _conv(
    x, w, b, g, e, y, pixels, H, W, HO, WO, CG, OG, R, S, K, xn, xc, xh, xw, en, ec, eh, ew, yn, yc, yh, yw,
    stride_h, stride_w, pad_h, pad_w, dil_h, dil_w, s, t,
    MODE: tl.constexpr, BIAS: tl.constexpr, GAIN: tl.constexpr, E: tl.constexpr, SHUFFLE: tl.constexpr,
    ALIGNED: tl.constexpr, SHALLOW: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Implicit GEMM: rows are output pixels, columns output channels of a group, the depth is (r, s, c).

    The expert's file defines epilogue(acc, bias, gain, e, where, s, t, MODE). fp32 as three TF32 products on the tensor
    cores, which is as exact as fp32; a shallow sum is cheaper without them.
    """
    group = tl.program_id(2)
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    o = tl.program_id(1) * BN + tl.arange(0, BN)
    j = m % WO
    i = (m // WO) % HO
    image = m // (WO * HO)
    base = x + image.to(tl.int64) * xn + group * CG * xc
    weights = w + (group * OG + o).to(tl.int64) * K
    acc = tl.zeros((BM, BN), tl.float32)
    if SHALLOW:
        for k in range(K):
            row = i * stride_h - pad_h + k // CG // S * dil_h
            col = j * stride_w - pad_w + k // CG % S * dil_w
            inside = (row >= 0) & (row < H) & (col >= 0) & (col < W) & (m < pixels)
            p = tl.load(base + row * xh + col * xw + k % CG * xc, mask=inside, other=0.0)
            acc += p[:, None] * tl.load(weights + k, mask=o < OG, other=0.0)[None, :]
    else:
        for k0 in range(0, K, BK):
            k = k0 + tl.arange(0, BK)
            if ALIGNED:
                # A block of the depth lies within one tap: row and column are the same for all its channels.
                tap = k0 // CG
                row = i * stride_h - pad_h + tap // S * dil_h
                col = j * stride_w - pad_w + tap % S * dil_w
                c = k0 % CG + tl.arange(0, BK)
                inside = (row >= 0) & (row < H) & (col >= 0) & (col < W) & (m < pixels)
                p = tl.load((base + row * xh + col * xw)[:, None] + c[None, :] * xc, mask=inside[:, None], other=0.0)
            else:
                row = i[:, None] * stride_h - pad_h + (k // CG // S)[None, :] * dil_h
                col = j[:, None] * stride_w - pad_w + (k // CG % S)[None, :] * dil_w
                inside = (row >= 0) & (row < H) & (col >= 0) & (col < W) & (m[:, None] < pixels) & (k[None, :] < K)
                p = tl.load(base[:, None] + (k % CG)[None, :] * xc + row * xh + col * xw, mask=inside, other=0.0)
            f = tl.load(weights[None, :] + k[:, None], mask=(o[None, :] < OG) & (k[:, None] < K), other=0.0)
            acc = tl.dot(p, f, acc, input_precision="tf32x3")
    c = group * OG + o
    inside = (m[:, None] < pixels) & (o[None, :] < OG)
    shift = tl.load(b + c, mask=o < OG, other=0.0) if BIAS else tl.zeros((BN,), tl.float32)
    gain = tl.load(g + c, mask=o < OG, other=0.0) if GAIN else tl.zeros((BN,), tl.float32)
    n = image[:, None].to(tl.int64)
    u = tl.load(e + n * en + (c * ec)[None, :] + (i * eh + j * ew)[:, None], mask=inside, other=0.0) if E else 0.0
    where = ((n * (OG * tl.num_programs(2)) + c[None, :]) * HO + i[:, None]) * WO + j[:, None]
    result = epilogue(acc, shift[None, :], gain[None, :], u, where, s, t, MODE)
    # Channel c of a pixel shuffle is pixel (c // r % r, c % r) of channel c // r^2; without shuffle r is 1.
    channel = c // (SHUFFLE * SHUFFLE) * yc + c // SHUFFLE % SHUFFLE * yh + c % SHUFFLE * yw
    to = y + n * yn + channel[None, :].to(tl.int64) + (i.to(tl.int64) * SHUFFLE * yh + j * SHUFFLE * yw)[:, None]
    tl.store(to, result, mask=inside)


# For small tensors: compiled once for all sizes and strides, the other once more for every kind of them.
_conv_any = triton.jit(_conv.fn, do_not_specialize=[p.name for p in _conv.params if not p.is_constexpr])


def _pair(v):
    return (v, v) if isinstance(v, int) else tuple(v)


def conv(
    input, weight, bias=None, stride=1, padding=0, dilation=1, groups=1, gain=None, e=None, out=None, shuffle=1, s=0.0,
    t=0.0, mode=0,
):  # fmt: skip
    """epilogue of conv2d(input, weight), bias (O,), gain (O,) and the tensor e (broadcast to the result); fp32."""
    (sh, sw), (ph, pw), (dh, dw) = _pair(stride), _pair(padding), _pair(dilation)
    N, _, H, W = input.shape
    O, CG, R, S = weight.shape
    HO = (H + 2 * ph - dh * (R - 1) - 1) // sh + 1
    WO = (W + 2 * pw - dw * (S - 1) - 1) // sw + 1
    y = out
    if y is None:
        size = (N, O // shuffle**2, HO * shuffle, WO * shuffle)
        y = torch.empty(size, dtype=input.dtype, device=input.device)
    pixels, OG, K = N * HO * WO, O // groups, CG * R * S
    if y.numel() == 0:
        return y
    w = weight.permute(0, 2, 3, 1).contiguous()
    extra = y if e is None else e.expand(N, O, HO, WO)
    shallow, few = K <= 48, max(y.numel(), input.numel()) < 1 << 17
    BM, BN, BK, warps = (128, 64, 32, 4) if pixels * OG >= 1 << 20 else (64, 32, 32, 4)
    if OG >= 256 and pixels * OG >= 1 << 21:
        BM, BN, warps = 128, 128, 8
    if shallow:
        BM, BN, warps = (128, min(32, max(2, triton.next_power_of_2(OG))), 4)
    if few:
        shallow, BM, BN = False, 32, 32
    kernel = _conv_any if few else _conv
    kernel[(triton.cdiv(pixels, BM), triton.cdiv(OG, BN), groups)](
        input, w, w if bias is None else bias.contiguous(), w if gain is None else gain, extra, y, pixels, H, W, HO, WO,
        CG, OG, R, S, K, *input.stride(), *extra.stride(), *y.stride(), sh, sw, ph, pw, dh, dw, s, t, MODE=mode,
        BIAS=bias is not None, GAIN=gain is not None, E=e is not None, SHUFFLE=shuffle, ALIGNED=not few and CG % BK == 0,
        SHALLOW=shallow, BM=BM, BN=BN, BK=BK, num_warps=warps, num_stages=3,
    )  # fmt: skip
    return y
