# task: quantization/linear_w4a16
# shows: packed bytes read eight weights at a time as int32 words; rows of few inputs are multiplied by tl.sum instead of tl.dot
# family: packing

import torch
import triton
import triton.language as tl


@triton.jit
def pack(w, packed, scales, K, pitch, so, sk, BLOCK: tl.constexpr):
    row, k = tl.program_id(0).to(tl.int64), tl.arange(0, 2 * BLOCK)
    v = tl.load(w + row * so + k * sk, mask=k < K, other=0.0).to(tl.float32)
    top = tl.max(tl.abs(v), 0)
    scale = tl.where(top > 0.0, tl.div_rn(top, 7.0), 1.0)
    tl.store(scales + row, scale)
    q = (tl.div_rn(v, tl.broadcast_to(scale, (2 * BLOCK,))) + 12582912.0).to(tl.int32, bitcast=True)
    low, high = tl.split(tl.reshape(q, (BLOCK, 2)))
    j = tl.arange(0, BLOCK)
    tl.store(packed + row * pitch + j, ((low & 15) | (high << 4)).to(tl.int8), mask=j < pitch)


@triton.jit
def unpack(words, n, O, pitch, w0, BN: tl.constexpr, BW: tl.constexpr):
    w = w0 + tl.arange(0, BW)
    word = tl.load(
        words + n[:, None].to(tl.int64) * pitch + w[None, :], mask=(n[:, None] < O) & (w[None, :] < pitch), other=0
    )
    nibbles = (word[:, :, None] >> (4 * tl.arange(0, 8))[None, None, :]) & 15
    return tl.reshape((nibbles ^ 8).to(tl.float16) - 8.0, (BN, 8 * BW))


@triton.jit
def linear(
    x, words, scales, bias, y, M, O, K, pitch, sm, sk,
    BIAS: tl.constexpr, DOT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BW: tl.constexpr,
):  # fmt: skip
    n, k = tl.program_id(1) * BN + tl.arange(0, BN), tl.arange(0, 8 * BW)
    if DOT:
        m = tl.program_id(0) * BM + tl.arange(0, BM)
        acc = tl.zeros((BM, BN), tl.float32)
    else:
        m = tl.program_id(0) + tl.arange(0, 1)
        acc = tl.zeros((1, BN), tl.float32)
    for w0 in range(0, pitch, BW):
        b = unpack(words, n, O, pitch, w0, BN, BW)
        kk = 8 * w0 + k
        a = tl.load(
            x + m[:, None].to(tl.int64) * sm + kk[None, :] * sk, mask=(m[:, None] < M) & (kk[None, :] < K), other=0.0
        )
        if DOT:
            acc = tl.dot(a, tl.trans(b), acc)
        else:
            acc += tl.sum(a.to(tl.float32) * b.to(tl.float32), 1)[None, :]
    r = acc * tl.load(scales + n, mask=n < O, other=0.0)[None, :]
    if BIAS:
        r += tl.load(bias + n, mask=n < O, other=0.0).to(tl.float32)[None, :]
    tl.store(y + m[:, None].to(tl.int64) * O + n[None, :], r.to(tl.float16), mask=(m[:, None] < M) & (n[None, :] < O))


def linear_w4a16(input, weight, bias=None):
    (M, K), O = input.shape, weight.shape[0]
    y = input.new_empty((M, O))
    if y.numel() == 0:
        return y
    pitch = triton.cdiv(K, 8)
    packed = torch.empty((O, 4 * pitch), dtype=torch.int8, device=input.device)
    scales = torch.empty(O, dtype=torch.float32, device=input.device)
    pack[(O,)](weight, packed, scales, K, 4 * pitch, *weight.stride(), BLOCK=triton.next_power_of_2(4 * pitch))
    vec = scales if bias is None else bias.contiguous()
    dot = M >= 16
    linear[(triton.cdiv(M, 16) if dot else M, triton.cdiv(O, 32))](
        input, packed.view(torch.int32), scales, vec, y, M, O, K, pitch, *input.stride(),
        BIAS=bias is not None, DOT=dot, BM=16, BN=32, BW=8,
    )  # fmt: skip
    return y
