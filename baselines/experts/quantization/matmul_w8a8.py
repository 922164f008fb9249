import torch
import triton
import triton.language as tl


@triton.jit
def _quantize(x, q, scales, length, along, across, q_along, q_across, BLOCK: tl.constexpr):
    """One program quantizes one row (or column): scale = max|x| / 127, q = round half to even of x / scale."""
    line = tl.program_id(0).to(tl.int64)
    x += line * across
    q += line * q_across
    peak = tl.zeros((BLOCK,), tl.float32)
    for e0 in range(0, length, BLOCK):
        e = e0 + tl.arange(0, BLOCK)
        peak = tl.maximum(peak, tl.abs(tl.load(x + e * along, mask=e < length, other=0.0)))
    top = tl.max(peak, 0)
    # The contract divides in IEEE fp32; "/" is an approximate division on the GPU.
    scale = tl.where(top == 0.0, 1.0, tl.div_rn(top, 127.0))
    tl.store(scales + line, scale)
    for e0 in range(0, length, BLOCK):
        e = e0 + tl.arange(0, BLOCK)
        v = tl.div_rn(tl.load(x + e * along, mask=e < length, other=0.0), tl.broadcast_to(scale, (BLOCK,)))
        # Adding 1.5 * 2^23 leaves no bits below one: the addition itself rounds half to even.
        v = (v + 12582912.0) - 12582912.0
        tl.store(q + e * q_along, v.to(tl.int8), mask=e < length)


@triton.jit
def _int8_matmul(a, b, sa, sb, y, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    acc = tl.zeros((BM, BN), tl.int32)
    for k0 in range(0, K, BK):
        k = k0 + tl.arange(0, BK)
        x = tl.load(a + m[:, None] * K + k[None, :], mask=(m[:, None] < M) & (k[None, :] < K), other=0)
        w = tl.load(b + n[None, :] * K + k[:, None], mask=(n[None, :] < N) & (k[:, None] < K), other=0)
        acc = tl.dot(x, w, acc, out_dtype=tl.int32)
    left = tl.load(sa + m, mask=m < M, other=0.0)
    right = tl.load(sb + n, mask=n < N, other=0.0)
    tl.store(
        y + m[:, None] * N + n[None, :],
        acc.to(tl.float32) * left[:, None] * right[None, :],
        mask=(m[:, None] < M) & (n[None, :] < N),
    )


def matmul_w8a8(input, weight):
    M, K = input.shape
    N = weight.shape[1]
    y = torch.empty((M, N), dtype=torch.float32, device=input.device)
    if y.numel() == 0:
        return y
    new = lambda *size, dtype: torch.empty(size, dtype=dtype, device=input.device)  # noqa: E731
    # Both operands are stored with K innermost, as the int8 tensor cores want them.
    qa, sa = new(M, K, dtype=torch.int8), new(M, dtype=torch.float32)
    qb, sb = new(N, K, dtype=torch.int8), new(N, dtype=torch.float32)
    BLOCK = min(1024, max(16, triton.next_power_of_2(K)))
    _quantize[(M,)](input, qa, sa, K, input.stride(1), input.stride(0), 1, K, BLOCK=BLOCK)
    _quantize[(N,)](weight, qb, sb, K, weight.stride(0), weight.stride(1), 1, K, BLOCK=BLOCK)
    BM, BN, BK = (128, 128, 64) if M * N >= 1 << 18 else (32, 32, 64)
    _int8_matmul[(triton.cdiv(M, BM), triton.cdiv(N, BN))](qa, qb, sa, sb, y, M, N, K, BM=BM, BN=BN, BK=BK)
    return y
