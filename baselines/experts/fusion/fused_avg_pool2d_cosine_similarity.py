"""One kernel reads both maps once and writes the similarities (1 / C of an input); a second, tiny one pools them.

A single kernel would have to read what overlapping windows share several times.
"""

import torch
import triton
import triton.language as tl


@triton.jit
def _similarity(x1, x2, s, C, P, eps, BC: tl.constexpr, BP: tl.constexpr):
    """Similarity at BP of the P positions of one image; BC channels at a time."""
    tiles = tl.cdiv(P, BP)
    n = (tl.program_id(0) // tiles).to(tl.int64)
    p = tl.program_id(0) % tiles * BP + tl.arange(0, BP)
    ab = tl.zeros((BC, BP), tl.float32)
    aa = tl.zeros((BC, BP), tl.float32)
    bb = tl.zeros((BC, BP), tl.float32)
    for c0 in range(0, C, BC):
        c = c0 + tl.arange(0, BC)
        inside = (c[:, None] < C) & (p[None, :] < P)
        at = (n * C + c[:, None]) * P + p[None, :]
        a = tl.load(x1 + at, mask=inside, other=0.0)
        b = tl.load(x2 + at, mask=inside, other=0.0)
        ab += a * b
        aa += a * a
        bb += b * b
    na = tl.maximum(tl.sqrt(tl.sum(aa, 0)), eps)
    nb = tl.maximum(tl.sqrt(tl.sum(bb, 0)), eps)
    tl.store(s + n * P + p, tl.sum(ab, 0) / na / nb, mask=p < P)


@triton.jit
def _pool(s, y, n, H, W, Ho, Wo, stride, padding, K, BLOCK: tl.constexpr):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    image = (o // (Ho * Wo)).to(tl.int64)
    h0 = o // Wo % Ho * stride - padding
    w0 = o % Wo * stride - padding
    total = tl.zeros((BLOCK,), tl.float32)
    for k in range(K * K):
        h = h0 + k // K
        w = w0 + k % K
        inside = (o < n) & (h >= 0) & (h < H) & (w >= 0) & (w < W)
        total += tl.load(s + (image * H + h) * W + w, mask=inside, other=0.0)
    tl.store(y + o, total / (K * K), mask=o < n)


def fused_avg_pool2d_cosine_similarity(x1, x2, kernel_size, stride=None, padding=0, eps=1e-8):
    x1, x2 = x1.contiguous(), x2.contiguous()
    N, C, H, W = x1.shape
    stride = kernel_size if stride is None else stride
    Ho = (H + 2 * padding - kernel_size) // stride + 1
    Wo = (W + 2 * padding - kernel_size) // stride + 1
    s = torch.empty((N, H, W), dtype=x1.dtype, device=x1.device)
    y = torch.empty((N, 1, Ho, Wo), dtype=x1.dtype, device=x1.device)
    n = y.numel()
    if n:
        _similarity[(N * triton.cdiv(H * W, 256),)](x1, x2, s, C, H * W, eps, BC=8, BP=256, num_warps=4)
        _pool[(triton.cdiv(n, 256),)](s, y, n, H, W, Ho, Wo, stride, padding, kernel_size, BLOCK=256, num_warps=4)
    return y
