import torch
import triton
import triton.language as tl


@triton.jit(do_not_specialize="first_h first_w taps_r taps_s step_r step_s TAPS_S".split())
def _transposed(
    x, w, b, y, H, W, HO, WO, CG, OG, KC, xn, xc, xh, xw, sh, sw, ph, pw, dh, dw, R, S,
    first_h, first_w, rows, columns, pixels, taps_r, taps_s, step_r, step_s, TAPS_S,
    BIAS: tl.constexpr, ALIGNED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """One phase of the output: pixels (first_h + a * sh, first_w + b * sw), which share the taps that reach them."""
    group = tl.program_id(2)
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    o = tl.program_id(1) * BN + tl.arange(0, BN)
    image = (m // (rows * columns)).to(tl.int64)
    u = m // columns % rows
    v = m % columns
    acc = tl.zeros((BM, BN), tl.float32)
    base = x + image * xn + group * CG * xc
    for k0 in range(0, KC, BK):
        k = k0 + tl.arange(0, BK)
        if ALIGNED:
            tap = k0 // CG
            r = taps_r + tap // TAPS_S * step_r
            s = taps_s + tap % TAPS_S * step_s
            c = k0 % CG + tl.arange(0, BK)
            # Within a phase the distance to the tap is a multiple of the stride.
            i = u + (first_h + ph - r * dh) // sh
            j = v + (first_w + pw - s * dw) // sw
            inside = (i >= 0) & (i < H) & (j >= 0) & (j < W) & (m < pixels)
            p = tl.load((base + i * xh + j * xw)[:, None] + c[None, :] * xc, mask=inside[:, None], other=0.0)
            taps = (r * S + s) * (OG * CG) + c
        else:
            c = k % CG
            r = taps_r + k // CG // TAPS_S * step_r
            s = taps_s + k // CG % TAPS_S * step_s
            i = u[:, None] + ((first_h + ph - r * dh) // sh)[None, :]
            j = v[:, None] + ((first_w + pw - s * dw) // sw)[None, :]
            inside = (i >= 0) & (i < H) & (j >= 0) & (j < W) & (m[:, None] < pixels) & (k[None, :] < KC)
            p = tl.load(base[:, None] + c[None, :] * xc + i * xh + j * xw, mask=inside, other=0.0)
            taps = (r * S + s) * (OG * CG) + c
        # Weights lie as (group, r, s, o, c): along the depth without gaps.
        from_w = w + group * (OG * CG * R * S) + (o * CG)[None, :] + taps[:, None]
        f = tl.load(from_w, mask=(o[None, :] < OG) if ALIGNED else (o[None, :] < OG) & (k[:, None] < KC), other=0.0)
        acc = tl.dot(p, f, acc, input_precision="tf32x3")
    if BIAS:
        acc += tl.load(b + group * OG + o, mask=o < OG, other=0.0)[None, :]
    pixel = (first_h + u * sh) * WO + first_w + v * sw
    to = (image[:, None] * (OG * tl.num_programs(2)) + group * OG + o[None, :]) * (HO * WO) + pixel[:, None]
    tl.store(y + to, acc, mask=(m[:, None] < pixels) & (o[None, :] < OG))


# For small tensors: compiled once for all sizes and strides, the other once more for every kind of them.
_transposed_any = triton.jit(
    _transposed.fn, do_not_specialize=[p.name for p in _transposed.params if not p.is_constexpr]
)


def _pair(v):
    return (v, v) if isinstance(v, int) else tuple(v)


def _phase(first, padding, stride, dilation, taps):
    """The taps r with (first + padding - r * dilation) divisible by stride: (first tap, distance, how many)."""
    found = [r for r in range(taps) if (first + padding - r * dilation) % stride == 0]
    return (found[0], found[1] - found[0] if len(found) > 1 else 1, len(found)) if found else (0, 1, 0)


def conv_transpose2d(input, weight, bias=None, stride=1, padding=0, output_padding=0, groups=1, dilation=1):
    """Output pixels fall into stride x stride phases; within a phase it is an ordinary convolution without zeros."""
    (sh, sw), (ph, pw), (dh, dw), (oph, opw) = _pair(stride), _pair(padding), _pair(dilation), _pair(output_padding)
    N, C, H, W = input.shape
    _, OG, R, S = weight.shape
    CG = C // groups
    HO = (H - 1) * sh - 2 * ph + dh * (R - 1) + oph + 1
    WO = (W - 1) * sw - 2 * pw + dw * (S - 1) + opw + 1
    y = torch.empty((N, OG * groups, HO, WO), dtype=input.dtype, device=input.device)
    if y.numel() == 0:
        return y
    w = weight.view(groups, CG, OG, R, S) if weight.is_contiguous() else weight.reshape(groups, CG, OG, R, S)
    w = w.permute(0, 3, 4, 2, 1).contiguous()
    few = max(input.numel(), y.numel()) < 1 << 17
    kernel = _transposed_any if few else _transposed
    for a in range(min(sh, HO)):
        for b in range(min(sw, WO)):
            rows, columns = (HO - a + sh - 1) // sh, (WO - b + sw - 1) // sw
            r0, step_r, nr = _phase(a, ph, sh, dh, R)
            s0, step_s, ns = _phase(b, pw, sw, dw, S)
            pixels = N * rows * columns
            BM, BN, BK, warps = (128, 64, 32, 4) if pixels * OG >= 1 << 20 else (64, 32, 32, 4)
            if OG >= 256 and pixels * OG >= 1 << 21:
                BM, BN, warps = 128, 128, 8
            if few:
                BM, BN = 32, 32
            kernel[(triton.cdiv(pixels, BM), triton.cdiv(OG, BN), groups)](
                input, w, w if bias is None else bias.contiguous(), y, H, W, HO, WO, CG, OG, CG * nr * ns, *input.stride(), sh,
                sw, ph, pw, dh, dw, R, S, a, b, rows, columns, pixels, r0, s0, step_r, step_s, max(ns, 1),
                BIAS=bias is not None, ALIGNED=not few and CG % BK == 0, BM=BM, BN=BN, BK=BK, num_warps=warps, num_stages=3,
            )  # fmt: skip
    return y
