# parts: int8
import torch
import triton
import triton.language as tl


@triton.jit
def _peaks(x, parts, C, H, W, xn, xc, xh, xw, CHUNKS, BLOCK: tl.constexpr):
    """The largest magnitude of one chunk of an image."""
    n = (tl.program_id(0) // CHUNKS).to(tl.int64)
    e = tl.program_id(0) % CHUNKS * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(x + n * xn + e // (H * W) * xc + e // W % H * xh + e % W * xw, mask=e < C * H * W, other=0.0)
    tl.store(parts + tl.program_id(0), tl.max(tl.abs(v), 0))


@triton.jit
def _images(
    x, parts, q, scales, C, H, W, xn, xc, xh, xw, CHUNKS, TOP: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr
):
    """Quantizes BP pixels of an image; q is stored with channels innermost, as the product reads it."""
    blocks = tl.cdiv(H * W, BP)
    n = (tl.program_id(0) // blocks).to(tl.int64)
    k = tl.arange(0, TOP)
    top = tl.max(tl.load(parts + n * CHUNKS + k, mask=k < CHUNKS, other=0.0), 0)
    scale = tl.where(top == 0.0, 1.0, tl.div_rn(top, 127.0))
    tl.store(scales + n, scale)
    p = tl.program_id(0) % blocks * BP + tl.arange(0, BP)
    for c0 in range(0, C, BC):
        c = c0 + tl.arange(0, BC)
        inside = (p[:, None] < H * W) & (c[None, :] < C)
        v = tl.load(x + n * xn + c[None, :] * xc + (p // W * xh + p % W * xw)[:, None], mask=inside, other=0.0)
        to = q + (n * H * W + p[:, None]) * C + c[None, :]
        tl.store(to, _round8(v, tl.broadcast_to(scale, (BP, BC))), mask=inside)


@triton.jit
def _conv8(
    q, w, b, sx, sw, y, pixels, C, H, W, HO, WO, O, S, K, sh, sw_, ph, pw,
    BIAS: tl.constexpr, ALIGNED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Implicit GEMM on int8: rows are output pixels, columns output channels, the depth is (r, s, c)."""
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    o = tl.program_id(1) * BN + tl.arange(0, BN)
    j = m % WO
    i = m // WO % HO
    image = m // (WO * HO)
    acc = tl.zeros((BM, BN), tl.int32)
    for k0 in range(0, K, BK):
        k = k0 + tl.arange(0, BK)
        if ALIGNED:
            # A block of the depth lies within one tap: row and column are the same for all its channels.
            row = i * sh - ph + k0 // C // S
            col = j * sw_ - pw + k0 // C % S
            inside = (row >= 0) & (row < H) & (col >= 0) & (col < W) & (m < pixels)
            # Told to the compiler, which then loads 16 bytes at a time.
            channel = tl.multiple_of(k0 % C, BK)
            base = tl.multiple_of(((image * H + row).to(tl.int64) * W + col) * C, 16) + channel
            x = tl.load(q + base[:, None] + tl.arange(0, BK)[None, :], mask=inside[:, None], other=0)
        else:
            row = i[:, None] * sh - ph + (k // C // S)[None, :]
            col = j[:, None] * sw_ - pw + (k // C % S)[None, :]
            inside = (row >= 0) & (row < H) & (col >= 0) & (col < W) & (m[:, None] < pixels) & (k[None, :] < K)
            at = ((image[:, None] * H + row).to(tl.int64) * W + col) * C + (k % C)[None, :]
            x = tl.load(q + at, mask=inside, other=0)
        f = tl.load(w + o[None, :].to(tl.int64) * K + k[:, None], mask=(o[None, :] < O) & (k[:, None] < K), other=0)
        acc = tl.dot(x, f, acc, out_dtype=tl.int32)
    left = tl.load(sx + image, mask=m < pixels, other=0.0)
    right = tl.load(sw + o, mask=o < O, other=0.0)
    result = acc.to(tl.float32) * left[:, None] * right[None, :]
    if BIAS:
        result += tl.load(b + o, mask=o < O, other=0.0)[None, :]
    to = (image[:, None].to(tl.int64) * O + o[None, :]) * (HO * WO) + (m % (HO * WO))[:, None]
    tl.store(y + to, result, mask=(m[:, None] < pixels) & (o[None, :] < O))


# For small tensors: compiled once for all sizes and strides, the other once more for every kind of them.
_peaks_any = triton.jit(_peaks.fn, do_not_specialize=[p.name for p in _peaks.params if not p.is_constexpr])
_images_any = triton.jit(_images.fn, do_not_specialize=[p.name for p in _images.params if not p.is_constexpr])
_conv8_any = triton.jit(_conv8.fn, do_not_specialize=[p.name for p in _conv8.params if not p.is_constexpr])


def _pair(v):
    return (v, v) if isinstance(v, int) else tuple(v)


def conv2d_w8a8(input, weight, bias=None, stride=1, padding=0):
    (sh, sw), (ph, pw) = _pair(stride), _pair(padding)
    N, C, H, W = input.shape
    O, _, R, S = weight.shape
    HO, WO = (H + 2 * ph - R) // sh + 1, (W + 2 * pw - S) // sw + 1
    y = torch.empty((N, O, HO, WO), dtype=torch.float32, device=input.device)
    if y.numel() == 0:
        return y
    K, pixels = C * R * S, N * HO * WO
    few = max(input.numel(), y.numel()) < 1 << 17
    peaks, images, conv8 = (_peaks_any, _images_any, _conv8_any) if few else (_peaks, _images, _conv8)
    qw, scale_w = quantize_lines(weight.permute(0, 2, 3, 1).reshape(1, O, K), few)
    BLOCK = max(1024, triton.next_power_of_2(triton.cdiv(C * H * W, 512)))
    CHUNKS = triton.cdiv(C * H * W, BLOCK)
    parts = torch.empty((N, CHUNKS), dtype=torch.float32, device=input.device)
    qx = torch.empty((N, H, W, C), dtype=torch.int8, device=input.device)
    scale_x = torch.empty(N, dtype=torch.float32, device=input.device)
    peaks[(N * CHUNKS,)](input, parts, C, H, W, *input.stride(), CHUNKS, BLOCK=BLOCK)
    BP = 64
    images[(N * triton.cdiv(H * W, BP),)](
        input, parts, qx, scale_x, C, H, W, *input.stride(), CHUNKS, TOP=max(128 if few else 1, triton.next_power_of_2(CHUNKS)),
        BP=BP, BC=16 if few else min(64, max(4, triton.next_power_of_2(C))),
    )  # fmt: skip
    BM, BN, BK = (128, 128, 64) if pixels * O >= 1 << 20 else (32, 32, 32)
    conv8[(triton.cdiv(pixels, BM), triton.cdiv(O, BN))](
        qx, qw, qw if bias is None else bias.contiguous(), scale_x, scale_w, y, pixels, C, H, W, HO, WO, O, S, K, sh, sw,
        ph, pw, BIAS=bias is not None, ALIGNED=not few and C % BK == 0, BM=BM, BN=BN, BK=BK,
        num_warps=8 if BM == 128 else 4, num_stages=3,
    )  # fmt: skip
    return y
