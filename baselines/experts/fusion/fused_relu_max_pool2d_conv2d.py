import torch
import triton
import triton.language as tl


@triton.jit
def _conv_pool(
    x, w, b, y, windows, H, W, HC, WC, HP, WP, CG, OG, R, S, K, xn, xc, xh, xw, sh, sw, ph, pw, dh, dw,
    KW, TAPS, psh, psw, pph, ppw, pdh, pdw,
    BIAS: tl.constexpr, ALIGNED: tl.constexpr, SHALLOW: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Implicit GEMM whose rows are pooling windows: one convolution per tap of the window, of which the largest stays."""
    group = tl.program_id(2)
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    o = tl.program_id(1) * BN + tl.arange(0, BN)
    image = (m // (WP * HP)).to(tl.int64)
    base = x + image * xn + group * CG * xc
    weights = w + (group * OG + o).to(tl.int64) * K
    best = tl.full((BM, BN), float("-inf"), tl.float32)
    for q in range(TAPS):
        i = (m // WP) % HP * psh - pph + q // KW * pdh
        j = m % WP * psw - ppw + q % KW * pdw
        exists = (i >= 0) & (i < HC) & (j >= 0) & (j < WC) & (m < windows)
        acc = tl.zeros((BM, BN), tl.float32)
        if SHALLOW:
            for k in range(K):
                row = i * sh - ph + k // CG // S * dh
                col = j * sw - pw + k // CG % S * dw
                inside = (row >= 0) & (row < H) & (col >= 0) & (col < W) & exists
                p = tl.load(base + row * xh + col * xw + k % CG * xc, mask=inside, other=0.0)
                acc += p[:, None] * tl.load(weights + k, mask=o < OG, other=0.0)[None, :]
        else:
            for k0 in range(0, K, BK):
                k = k0 + tl.arange(0, BK)
                if ALIGNED:
                    tap = k0 // CG
                    row = i * sh - ph + tap // S * dh
                    col = j * sw - pw + tap % S * dw
                    inside = (row >= 0) & (row < H) & (col >= 0) & (col < W) & exists
                    c = k0 % CG + tl.arange(0, BK)
                    p = tl.load(
                        (base + row * xh + col * xw)[:, None] + c[None, :] * xc, mask=inside[:, None], other=0.0
                    )
                else:
                    row = i[:, None] * sh - ph + (k // CG // S)[None, :] * dh
                    col = j[:, None] * sw - pw + (k // CG % S)[None, :] * dw
                    inside = (row >= 0) & (row < H) & (col >= 0) & (col < W) & exists[:, None] & (k[None, :] < K)
                    p = tl.load(base[:, None] + (k % CG)[None, :] * xc + row * xh + col * xw, mask=inside, other=0.0)
                f = tl.load(weights[None, :] + k[:, None], mask=(o[None, :] < OG) & (k[:, None] < K), other=0.0)
                acc = tl.dot(p, f, acc, input_precision="tf32x3")
        best = tl.where(exists[:, None], tl.maximum(best, acc), best)
    if BIAS:
        best += tl.load(b + group * OG + o, mask=o < OG, other=0.0)[None, :]
    to = (image[:, None] * (OG * tl.num_programs(2)) + group * OG + o[None, :]) * (HP * WP) + (m % (HP * WP))[:, None]
    tl.store(y + to, tl.maximum(best, 0.0), mask=(m[:, None] < windows) & (o[None, :] < OG))


# For small tensors: compiled once for all sizes and strides, the other once more for every kind of them.
_conv_pool_any = triton.jit(_conv_pool.fn, do_not_specialize=[p.name for p in _conv_pool.params if not p.is_constexpr])


def _pair(v):
    return (v, v) if isinstance(v, int) else tuple(v)


def _windows(size, kernel, stride, padding, dilation, ceil):
    reach = size + 2 * padding - dilation * (kernel - 1) - 1
    count = (reach + (stride - 1 if ceil else 0)) // stride + 1
    return count - 1 if ceil and (count - 1) * stride >= size + padding else count


def fused_relu_max_pool2d_conv2d(
    input, weight, bias=None, conv_stride=1, conv_padding=0, conv_dilation=1, conv_groups=1, pool_kernel_size=2,
    pool_stride=None, pool_padding=0, pool_dilation=1, pool_ceil_mode=False, inplace=False,
):  # fmt: skip
    (sh, sw), (ph, pw), (dh, dw) = _pair(conv_stride), _pair(conv_padding), _pair(conv_dilation)
    (kh, kw), (pph, ppw), (pdh, pdw) = _pair(pool_kernel_size), _pair(pool_padding), _pair(pool_dilation)
    psh, psw = (kh, kw) if pool_stride is None else _pair(pool_stride)
    N, _, H, W = input.shape
    O, CG, R, S = weight.shape
    HC = (H + 2 * ph - dh * (R - 1) - 1) // sh + 1
    WC = (W + 2 * pw - dw * (S - 1) - 1) // sw + 1
    HP, WP = _windows(HC, kh, psh, pph, pdh, pool_ceil_mode), _windows(WC, kw, psw, ppw, pdw, pool_ceil_mode)
    y = torch.empty((N, O, HP, WP), dtype=input.dtype, device=input.device)
    windows, OG, K = N * HP * WP, O // conv_groups, CG * R * S
    if y.numel() == 0:
        return y
    w = weight.permute(0, 2, 3, 1).contiguous()
    shallow = K <= 48
    BM, BN, BK = (128, 64, 32) if windows * OG >= 1 << 19 else (64, 32, 32)
    if shallow:
        BM, BN = 128, min(32, max(2, triton.next_power_of_2(OG)))
    kernel, few = _conv_pool, input.numel() < 1 << 17
    if few:
        kernel, shallow, BM, BN = _conv_pool_any, False, 32, 32
    kernel[(triton.cdiv(windows, BM), triton.cdiv(OG, BN), conv_groups)](
        input, w, w if bias is None else bias.contiguous(), y, windows, H, W, HC, WC, HP, WP, CG, OG, R, S, K, *input.stride(),
        sh, sw, ph, pw, dh, dw, kw, kh * kw, psh, psw, pph, ppw, pdh, pdw, BIAS=bias is not None, ALIGNED=not few and CG % BK == 0,
        SHALLOW=shallow, BM=BM, BN=BN, BK=BK, num_warps=4, num_stages=3,
    )  # fmt: skip
    return y
