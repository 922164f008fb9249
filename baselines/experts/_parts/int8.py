import torch
import triton
import triton.language as tl


@triton.jit
def _round8(v, scale):
    """round half to even of v / scale, in IEEE fp32 as the contract says ("/" is approximate on the GPU)."""
    # Adding 1.5 * 2^23 leaves no bits below one: the addition itself rounds half to even.
    return ((tl.div_rn(v, scale) + 12582912.0) - 12582912.0).to(tl.int8)


@triton.jit
def _quantize_lines(
    x, q, scales, lines, L, M, xb, xm, xl, WHOLE: tl.constexpr, BR: tl.constexpr, BL: tl.constexpr
):  # fmt: skip
    """Line r = (batch, m) of L numbers: scale = max|x| / 127 (1 if all are zero), q = round(x / scale); q is dense."""
    r = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    e = tl.arange(0, BL)
    rows = x + (r // M * xb + r % M * xm)[:, None]
    peak = tl.zeros((BR, BL), tl.float32)
    v = peak
    for e0 in range(0, L, BL):
        inside = (r[:, None] < lines) & (e0 + e[None, :] < L)
        v = tl.load(rows + (e0 + e[None, :]).to(tl.int64) * xl, mask=inside, other=0.0).to(tl.float32)
        peak = tl.maximum(peak, tl.abs(v))
    top = tl.max(peak, 1)
    scale = tl.where(top == 0.0, 1.0, tl.div_rn(top, tl.full((BR,), 127.0, tl.float32)))
    tl.store(scales + r, scale, mask=r < lines)
    wide = tl.broadcast_to(scale[:, None], (BR, BL))
    if WHOLE:
        inside = (r[:, None] < lines) & (e[None, :] < L)
        tl.store(q + r[:, None] * L + e[None, :], _round8(v, wide), mask=inside)
    else:
        for e0 in range(0, L, BL):
            inside = (r[:, None] < lines) & (e0 + e[None, :] < L)
            v = tl.load(rows + (e0 + e[None, :]).to(tl.int64) * xl, mask=inside, other=0.0).to(tl.float32)
            tl.store(q + r[:, None] * L + e0 + e[None, :], _round8(v, wide), mask=inside)


# For small tensors: compiled once for all sizes and strides, the other once more for every kind of them.
_quantize_lines_any = triton.jit(
    _quantize_lines.fn, do_not_specialize=[p.name for p in _quantize_lines.params if not p.is_constexpr]
)


def quantize_lines(x, few=False):
    """int8 (B, M, L) dense and scales (B, M) of x (B, M, L), one scale per line along the last axis; any strides.

    few: the tensors are small (see _quantize_lines_any).
    """
    B, M, L = x.shape
    q = torch.empty((B, M, L), dtype=torch.int8, device=x.device)
    scales = torch.empty((B, M), dtype=torch.float32, device=x.device)
    if B * M:
        # Lines that are not dense are read several at a time, so that neighbours in memory are read together.
        dense = x.stride(2) == 1
        BL = min(4096 if dense else 64, max(16, triton.next_power_of_2(L)))
        BR = 1 if dense and L > 256 else 8 if dense else 64
        kernel = _quantize_lines_any if few else _quantize_lines
        kernel[(triton.cdiv(B * M, BR),)](
            x, q, scales, B * M, L, M, *x.stride(), WHOLE=BL >= L, BR=BR, BL=BL, num_warps=8 if BL * BR > 2048 else 4
        )
    return q, scales


@triton.jit
def _gemm8(
    a, b, sa, sb, y, M, N, K, EVEN: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr
):  # fmt: skip
    """y = (a @ b^T) * sa * sb for int8 a (batch, M, K) and b (batch, N, K), both dense, with an int32 accumulator."""
    rows, columns = tl.cdiv(M, BM), tl.cdiv(N, BN)
    pid = tl.program_id(0) % (rows * columns)
    batch = (tl.program_id(0) // (rows * columns)).to(tl.int64)
    first = pid // (GROUP * columns) * GROUP
    height = tl.minimum(rows - first, GROUP)
    m = (first + pid % (GROUP * columns) % height) * BM + tl.arange(0, BM)
    n = pid % (GROUP * columns) // height * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    pa = a + batch * M * K + (m % M)[:, None].to(tl.int64) * K + k[None, :]
    pb = b + batch * N * K + (n % N)[None, :].to(tl.int64) * K + k[:, None]
    acc = tl.zeros((BM, BN), tl.int32)
    for k0 in range(0, K, BK):
        if EVEN:
            x, w = tl.load(pa), tl.load(pb)
        else:
            x = tl.load(pa, mask=k[None, :] < K - k0, other=0)
            w = tl.load(pb, mask=k[:, None] < K - k0, other=0)
        acc = tl.dot(x, w, acc, out_dtype=tl.int32)
        pa += BK
        pb += BK
    left = tl.load(sa + batch * M + m, mask=m < M, other=0.0)
    right = tl.load(sb + batch * N + n, mask=n < N, other=0.0)
    where = (batch * M + m[:, None]) * N + n[None, :]
    result = acc.to(tl.float32) * left[:, None] * right[None, :]
    tl.store(y + where, result, mask=(m[:, None] < M) & (n[None, :] < N))


# For small tensors: compiled once for all sizes and strides, the other once more for every kind of them.
_gemm8_any = triton.jit(_gemm8.fn, do_not_specialize=[p.name for p in _gemm8.params if not p.is_constexpr])


def gemm8(qa, sa, qb, sb):
    """fp32 (B, M, N) from dense int8 (B, M, K) and (B, N, K) and their scales."""
    B, M, K = qa.shape
    N = qb.shape[1]
    y = torch.empty((B, M, N), dtype=torch.float32, device=qa.device)
    if y.numel():
        few = max(qa.numel(), qb.numel(), y.numel()) < 1 << 17
        BM, BN, BK, warps = 32, 32, 64, 4
        for tile in ((128, 256, 128, 8), (128, 128, 128, 8), (64, 64, 128, 4)):
            if triton.cdiv(M, tile[0]) * triton.cdiv(N, tile[1]) * B >= 128:
                BM, BN, BK, warps = tile
                break
        kernel = _gemm8_any if few else _gemm8
        kernel[(triton.cdiv(M, BM) * triton.cdiv(N, BN) * B,)](
            qa,
            qb,
            sa,
            sb,
            y,
            M,
            N,
            K,
            EVEN=not few and K % BK == 0,
            BM=BM,
            BN=BN,
            BK=BK,
            GROUP=8,
            num_warps=warps,
            num_stages=3,
        )
    return y
