import torch
import triton
import triton.language as tl


@triton.jit
def _matmul(
    a, b, c, M, N, K, ab, am, ak, bb, bk, bn,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
):
    # Programs walk down GROUP rows of tiles at a time, so that tiles of b are still in L2 when they are needed again.
    pid = tl.program_id(0)
    rows, columns = tl.cdiv(M, BM), tl.cdiv(N, BN)
    first = pid // (GROUP * columns) * GROUP
    height = tl.minimum(rows - first, GROUP)
    tile_m = first + pid % (GROUP * columns) % height
    tile_n = pid % (GROUP * columns) // height
    batch = tl.program_id(1).to(tl.int64)
    m = tile_m * BM + tl.arange(0, BM)
    n = tile_n * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    pa = a + batch * ab + m[:, None].to(tl.int64) * am + k[None, :] * ak
    pb = b + batch * bb + k[:, None] * bk + n[None, :].to(tl.int64) * bn
    acc = tl.zeros((BM, BN), tl.float32)
    for k0 in range(0, K, BK):
        x = tl.load(pa, mask=(m[:, None] < M) & (k[None, :] < K - k0), other=0.0)
        y = tl.load(pb, mask=(k[:, None] < K - k0) & (n[None, :] < N), other=0.0)
        acc = tl.dot(x, y, acc)
        pa += BK * ak
        pb += BK * bk
    where = (batch * M + m[:, None]) * N + n[None, :]
    tl.store(c + where, acc.to(tl.bfloat16), mask=(m[:, None] < M) & (n[None, :] < N))


def matmul_bf16(input, other):
    row, column = input.dim() == 1, other.dim() == 1
    a = input.unsqueeze(0) if row else input
    b = other.unsqueeze(1) if column else other
    M, K = a.shape[-2:]
    N = b.shape[-1]
    lead = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    c = torch.empty((*lead, M, N), dtype=input.dtype, device=input.device)
    if c.numel():
        # A broadcast operand keeps stride 0 over a single batch axis; over several it is copied.
        a = a.expand(*lead, M, K).reshape(-1, M, K)
        b = b.expand(*lead, K, N).reshape(-1, K, N)
        big = M * N >= 1 << 18
        BM, BN, BK = (128, 128, 64) if big else (32, 32, 32)
        _matmul[(triton.cdiv(M, BM) * triton.cdiv(N, BN), a.shape[0])](
            a, b, c, M, N, K, *a.stride(), *b.stride(), BM=BM, BN=BN, BK=BK, GROUP=8,
            num_warps=8 if big else 4, num_stages=3,
        )  # fmt: skip
    c = c.squeeze(-2) if row else c
    return c.squeeze(-1) if column else c
