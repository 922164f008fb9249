import torch
import triton
import triton.language as tl


@triton.jit
def _pack(w, q, scales, K, wo, wk, BLOCK: tl.constexpr):
    """One row of weights: scale = max|w| / 7 (1 if all are zero), two rounded neighbours to a byte."""
    o = tl.program_id(0).to(tl.int64)
    w += o * wo
    k = tl.arange(0, 2 * BLOCK)
    peak = tl.zeros((2 * BLOCK,), tl.float32)
    v = peak
    for k0 in range(0, K, 2 * BLOCK):
        v = tl.load(w + (k0 + k) * wk, mask=k0 + k < K, other=0.0).to(tl.float32)
        peak = tl.maximum(peak, tl.abs(v))
    top = tl.max(peak, 0)
    scale = tl.where(top == 0.0, 1.0, tl.div_rn(top, 7.0))
    tl.store(scales + o, scale)
    inverse = tl.where(top == 0.0, 1.0, tl.div_rn(7.0, tl.where(top == 0.0, 7.0, top)))
    for k0 in range(0, K, 2 * BLOCK):
        if K > 2 * BLOCK:
            v = tl.load(w + (k0 + k) * wk, mask=k0 + k < K, other=0.0).to(tl.float32)
        # Adding 1.5 * 2^23 leaves no bits below one: the addition itself rounds half to even, and the low bits of the sum
        # are the rounded number in two's complement.
        bits = (v * inverse + 12582912.0).to(tl.int32, bitcast=True)
        low, high = tl.split(tl.reshape(bits, (BLOCK, 2)))
        j = k0 // 2 + tl.arange(0, BLOCK)
        tl.store(q + o * (K // 2) + j, ((low & 15) | (high << 4)).to(tl.int8), mask=j < K // 2)


@triton.jit
def _linear4(
    x, q, scales, bias, y, B, O, half, BIAS: tl.constexpr, EVEN: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """BK bytes are 2 BK weights: the even and the odd ones each multiply their own half of the inputs.

    The transposed result is computed, because the left operand of a product may come out of registers, where the
    weights are unpacked.
    """
    rows, columns = tl.cdiv(O, BN), tl.cdiv(B, BM)
    pid = tl.program_id(0)
    first = pid // (GROUP * columns) * GROUP
    height = tl.minimum(rows - first, GROUP)
    n = (first + pid % (GROUP * columns) % height) * BN + tl.arange(0, BN)
    m = pid % (GROUP * columns) // height * BM + tl.arange(0, BM)
    k = tl.arange(0, BK)
    acc = tl.zeros((BN, BM), tl.float32)
    # x is stored with its even columns first, so that both halves are dense.
    px = x + (m % B)[None, :].to(tl.int64) * (2 * half) + k[:, None]
    pq = q + (n % O)[:, None].to(tl.int64) * half + k[None, :]
    for k0 in range(0, half, BK):
        if EVEN:
            both, even, odd = tl.load(pq), tl.load(px), tl.load(px + half)
        else:
            left = k < half - k0
            both = tl.load(pq, mask=left[None, :], other=0)
            even = tl.load(px, mask=left[:, None], other=0.0)
            odd = tl.load(px + half, mask=left[:, None], other=0.0)
        acc = tl.dot(((both & 15) ^ 8).to(tl.float16) - 8.0, even, acc)
        acc = tl.dot((both >> 4).to(tl.float16), odd, acc)
        px += BK
        pq += BK
    result = acc * tl.load(scales + n, mask=n < O, other=0.0)[:, None]
    if BIAS:
        result += tl.load(bias + n, mask=n < O, other=0.0).to(tl.float32)[:, None]
    to = y + m[None, :].to(tl.int64) * O + n[:, None]
    tl.store(to, result.to(tl.float16), mask=(m[None, :] < B) & (n[:, None] < O))


# For small tensors: compiled once for all sizes and strides, the other once more for every kind of them.
_pack_any = triton.jit(_pack.fn, do_not_specialize=[p.name for p in _pack.params if not p.is_constexpr])
_linear4_any = triton.jit(_linear4.fn, do_not_specialize=[p.name for p in _linear4.params if not p.is_constexpr])


def linear_w4a16(input, weight, bias=None):
    B, K = input.shape
    O = weight.shape[0]
    y = torch.empty((B, O), dtype=input.dtype, device=input.device)
    if y.numel() == 0:
        return y
    half = K // 2
    q = torch.empty((O, half), dtype=torch.int8, device=input.device)
    scales = torch.empty(O, dtype=torch.float32, device=input.device)
    few = max(weight.numel(), input.numel()) < 1 << 17
    pack, linear4 = (_pack_any, _linear4_any) if few else (_pack, _linear4)
    BLOCK = 128 if few else min(2048, max(16, triton.next_power_of_2(half)))
    pack[(O,)](weight, q, scales, K, *weight.stride(), BLOCK=BLOCK)
    x = torch.empty((B, 2, half), dtype=input.dtype, device=input.device)
    x[:, 0].copy_(input[:, 0::2])
    x[:, 1].copy_(input[:, 1::2])
    BM, BN, BK, warps = (16 if B <= 16 else 32, 64, 128, 4)
    if triton.cdiv(B, 128) * triton.cdiv(O, 128) >= 100:
        BM, BN, BK, warps = 256, 128, 64, 8
    if few:
        BM, BN, BK = 16, 32, 64
    linear4[(triton.cdiv(O, BN) * triton.cdiv(B, BM),)](
        x, q, scales, q if bias is None else bias.contiguous(), y, B, O, half, BIAS=bias is not None,
        EVEN=not few and half % BK == 0, BM=BM, BN=BN, BK=BK, GROUP=8, num_warps=warps, num_stages=3,
    )  # fmt: skip
    return y
