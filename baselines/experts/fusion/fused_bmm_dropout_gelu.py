import torch
import triton
import triton.language as tl


@triton.jit
def _bmm_dropout_gelu(
    a,
    b,
    y,
    N,
    M,
    P,
    ab,
    an,
    am,
    bb,
    bm,
    bp,
    seed,
    p,
    scale,
    DROP: tl.constexpr,
    TANH: tl.constexpr,
    BN: tl.constexpr,
    BP: tl.constexpr,
    BM: tl.constexpr,
):
    batch = tl.program_id(2).to(tl.int64)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    q = tl.program_id(1) * BP + tl.arange(0, BP)
    a += batch * ab
    b += batch * bb
    acc = tl.zeros((BN, BP), tl.float32)
    for k0 in range(0, M, BM):
        k = k0 + tl.arange(0, BM)
        x = tl.load(a + n[:, None] * an + k[None, :] * am, mask=(n[:, None] < N) & (k[None, :] < M), other=0.0)
        w = tl.load(b + k[:, None] * bm + q[None, :] * bp, mask=(k[:, None] < M) & (q[None, :] < P), other=0.0)
        acc = tl.dot(x, w, acc, input_precision="ieee")
    where = (batch * N + n[:, None]) * P + q[None, :]
    if DROP:
        keep = tl.rand(seed, where.to(tl.int32)) >= p
        acc = tl.where(keep, acc * scale, 0.0)
    if TANH:
        acc = acc * tl.sigmoid(1.5957691216057308 * (acc + 0.044715 * acc * acc * acc))
    else:
        acc = 0.5 * acc * (1.0 + tl.erf(acc * 0.7071067811865476))
    tl.store(y + where, acc.to(y.dtype.element_ty), mask=(n[:, None] < N) & (q[None, :] < P))


def fused_bmm_dropout_gelu(input1, input2, p=0.5, training=True, inplace=False, approximate="none", *, out=None):
    B, N, M = input1.shape
    P = input2.shape[2]
    y = torch.empty((B, N, P), dtype=input1.dtype, device=input1.device)
    if y.numel():
        drop = training and p > 0
        seed = torch.randint(0, 2**31 - 1, (1,)).item() if drop else 0
        scale = 1.0 / (1.0 - p) if p < 1 else 0.0
        BN, BP, BM = (64, 64, 32) if N * P >= 1 << 14 else (32, 32, 32)
        _bmm_dropout_gelu[(triton.cdiv(N, BN), triton.cdiv(P, BP), B)](
            input1, input2, y, N, M, P, *input1.stride(), *input2.stride(), seed, float(p), scale,
            DROP=drop, TANH=approximate == "tanh", BN=BN, BP=BP, BM=BM,
        )  # fmt: skip
    return y if out is None else out.copy_(y)
