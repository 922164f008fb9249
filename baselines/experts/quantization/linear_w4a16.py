import torch
import triton
import triton.language as tl


@triton.jit
def _pack(w, q, scales, K, wo, wk, BLOCK: tl.constexpr):
    """One row of weights: scale = max|w| / 7 (1 if all are zero), two rounded neighbours to a byte."""
    o = tl.program_id(0).to(tl.int64)
    w += o * wo
    half = K // 2
    k = tl.arange(0, BLOCK)
    peak = tl.zeros((BLOCK,), tl.float32)
    for k0 in range(0, half, BLOCK):
        inside = k0 + k < half
        even = tl.load(w + 2 * (k0 + k) * wk, mask=inside, other=0.0).to(tl.float32)
        odd = tl.load(w + (2 * (k0 + k) + 1) * wk, mask=inside, other=0.0).to(tl.float32)
        peak = tl.maximum(peak, tl.maximum(tl.abs(even), tl.abs(odd)))
    top = tl.max(peak, 0)
    scale = tl.where(top == 0.0, 1.0, tl.div_rn(top, 7.0))
    tl.store(scales + o, scale)
    wide = tl.broadcast_to(scale, (BLOCK,))
    for k0 in range(0, half, BLOCK):
        inside = k0 + k < half
        even = tl.load(w + 2 * (k0 + k) * wk, mask=inside, other=0.0).to(tl.float32)
        odd = tl.load(w + (2 * (k0 + k) + 1) * wk, mask=inside, other=0.0).to(tl.float32)
        # Adding 1.5 * 2^23 leaves no bits below one: the addition itself rounds half to even.
        low = ((tl.div_rn(even, wide) + 12582912.0) - 12582912.0).to(tl.int32)
        high = ((tl.div_rn(odd, wide) + 12582912.0) - 12582912.0).to(tl.int32)
        tl.store(q + o * half + k0 + k, ((low & 15) | (high << 4)).to(tl.int8), mask=inside)


@triton.jit
def _linear4(
    x, q, scales, bias, y, B, O, half, BIAS: tl.constexpr, EVEN: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """BK bytes are 2 BK weights: the even and the odd ones each multiply their own half of the inputs."""
    rows, columns = tl.cdiv(B, BM), tl.cdiv(O, BN)
    pid = tl.program_id(0)
    first = pid // (GROUP * columns) * GROUP
    height = tl.minimum(rows - first, GROUP)
    m = (first + pid % (GROUP * columns) % height) * BM + tl.arange(0, BM)
    n = pid % (GROUP * columns) // height * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    acc = tl.zeros((BM, BN), tl.float32)
    # x is stored with its even columns first, so that both halves are dense.
    px = x + (m % B)[:, None].to(tl.int64) * (2 * half) + k[None, :]
    pq = q + (n % O)[None, :].to(tl.int64) * half + k[:, None]
    for k0 in range(0, half, BK):
        if EVEN:
            bytes, even, odd = tl.load(pq), tl.load(px), tl.load(px + half)
        else:
            left = k < half - k0
            bytes = tl.load(pq, mask=left[:, None], other=0)
            even = tl.load(px, mask=left[None, :], other=0.0)
            odd = tl.load(px + half, mask=left[None, :], other=0.0)
        acc = tl.dot(even, ((bytes & 15) ^ 8).to(tl.float16) - 8.0, acc)
        acc = tl.dot(odd, (bytes >> 4).to(tl.float16), acc)
        px += BK
        pq += BK
    result = acc * tl.load(scales + n, mask=n < O, other=0.0)[None, :]
    if BIAS:
        result += tl.load(bias + n, mask=n < O, other=0.0).to(tl.float32)[None, :]
    to = y + m[:, None].to(tl.int64) * O + n[None, :]
    tl.store(to, result.to(tl.float16), mask=(m[:, None] < B) & (n[None, :] < O))


def linear_w4a16(input, weight, bias=None):
    B, K = input.shape
    O = weight.shape[0]
    y = torch.empty((B, O), dtype=input.dtype, device=input.device)
    if y.numel() == 0:
        return y
    half = K // 2
    q = torch.empty((O, half), dtype=torch.int8, device=input.device)
    scales = torch.empty(O, dtype=torch.float32, device=input.device)
    _pack[(O,)](weight, q, scales, K, *weight.stride(), BLOCK=min(1024, max(16, triton.next_power_of_2(half))))
    x = torch.empty((B, 2, half), dtype=input.dtype, device=input.device)
    x[:, 0].copy_(input[:, 0::2])
    x[:, 1].copy_(input[:, 1::2])
    BM, BN, BK, warps = (16 if B <= 16 else 32, 64, 64, 4)
    if triton.cdiv(B, 128) * triton.cdiv(O, 128) >= 100:
        BM, BN, BK, warps = 128, 128, 64, 8
    _linear4[(triton.cdiv(B, BM) * triton.cdiv(O, BN),)](
        x, q, scales, q if bias is None else bias.contiguous(), y, B, O, half, BIAS=bias is not None, EVEN=half % BK == 0,
        BM=BM, BN=BN, BK=BK, GROUP=8, num_warps=warps, num_stages=3,
    )  # fmt: skip
    return y
