# task: quantization/linear_w4a16
# shows: nibbles sign-extended by int8 shifts and put back in order with tl.interleave in front of one product
# family: packing

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice


@triton.jit
def pack_int4(w, packed, scales, half, so, sk, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    j = tl.arange(0, BLOCK)
    top = 0.0
    for j0 in range(0, half, BLOCK):
        p = w + row * so + 2 * (j0 + j).to(tl.int64) * sk
        pair = tl.join(tl.load(p, mask=j0 + j < half, other=0.0), tl.load(p + sk, mask=j0 + j < half, other=0.0))
        top = tl.maximum(top, tl.max(tl.max(tl.abs(pair.to(tl.float32)), 1), 0))
    scale = tl.where(top > 0.0, tl.div_rn(top, 7.0), 1.0)
    tl.store(scales + row, scale)
    for j0 in range(0, half, BLOCK):
        p = w + row * so + 2 * (j0 + j).to(tl.int64) * sk
        pair = tl.join(tl.load(p, mask=j0 + j < half, other=0.0), tl.load(p + sk, mask=j0 + j < half, other=0.0))
        q = libdevice.rint(tl.div_rn(pair.to(tl.float32), tl.broadcast_to(scale, (BLOCK, 2)))).to(tl.int8)
        low, high = tl.split(q)
        tl.store(packed + row * half + j0 + j, (low & 0xF) | (high << 4), mask=j0 + j < half)


@triton.jit
def linear_int4(
    x, packed, scales, bias, y, B, O, half, sb, sk, BIAS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BH: tl.constexpr
):  # fmt: skip
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    h = tl.arange(0, BH)
    k = tl.arange(0, 2 * BH)
    acc = tl.zeros((BM, BN), tl.float32)
    for h0 in range(0, half, BH):
        inside = (n[:, None] < O) & (h0 + h[None, :] < half)
        b = tl.load(packed + n[:, None].to(tl.int64) * half + h0 + h[None, :], mask=inside, other=0)
        w = tl.interleave((b << 4) >> 4, b >> 4).to(tl.float16)
        kk = 2 * h0 + k
        a = tl.load(
            x + m[:, None].to(tl.int64) * sb + kk[None, :] * sk,
            mask=(m[:, None] < B) & (kk[None, :] < 2 * half),
            other=0.0,
        )
        acc = tl.dot(a, tl.trans(w), acc)
    r = acc * tl.load(scales + n, mask=n < O, other=0.0)[None, :]
    if BIAS:
        r += tl.load(bias + n, mask=n < O, other=0.0).to(tl.float32)[None, :]
    tl.store(y + m[:, None].to(tl.int64) * O + n[None, :], r.to(tl.float16), mask=(m[:, None] < B) & (n[None, :] < O))


def linear_w4a16(input, weight, bias=None):
    (B, K), O = input.shape, weight.shape[0]
    y = input.new_empty((B, O))
    if y.numel() == 0:
        return y
    packed = torch.empty((O, K // 2), dtype=torch.int8, device=input.device)
    scales = torch.empty(O, dtype=torch.float32, device=input.device)
    pack_int4[(O,)](weight, packed, scales, K // 2, *weight.stride(), BLOCK=256)
    vec = None if bias is None else bias.contiguous()
    grid = (triton.cdiv(B, 16), triton.cdiv(O, 64))
    linear_int4[grid](
        input, packed, scales, vec, y, B, O, K // 2, *input.stride(), BIAS=vec is not None, BM=16, BN=64, BH=32
    )
    return y
