"""Matrix product: tl.dot on bf16 with an fp32 accumulator, tiles in grouped order."""

import torch
import triton
import triton.language as tl


@triton.jit
def _matmul(
    a,
    b,
    c,
    M,
    N,
    K,
    ab,
    am,
    ak,
    bb,
    bk,
    bn,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
):
    rows, columns = tl.cdiv(M, BM), tl.cdiv(N, BN)
    # One grid axis for tiles and batch: the second one of CUDA ends at 65535.
    pid = tl.program_id(0) % (rows * columns)
    batch = (tl.program_id(0) // (rows * columns)).to(tl.int64)
    # Programs walk down GROUP rows of tiles at a time, so that tiles of b are still in L2 when they are needed again.
    first = pid // (GROUP * columns) * GROUP
    height = tl.minimum(rows - first, GROUP)
    tile_m = first + pid % (GROUP * columns) % height
    tile_n = pid % (GROUP * columns) // height
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
    """Brings 1-D and broadcast operands to (batch, M, K) and (batch, K, N)."""
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
        # The largest tile that still gives every multiprocessor of an H200 (132) about one program.
        BM = BN = 32
        for edge in (128, 64):
            if triton.cdiv(M, edge) * triton.cdiv(N, edge) * a.shape[0] >= 128:
                BM = BN = edge
                break
        _matmul[(triton.cdiv(M, BM) * triton.cdiv(N, BN) * a.shape[0],)](
            a, b, c, M, N, K, *a.stride(), *b.stride(), BM=BM, BN=BN, BK=32 if BM == 32 else 64, GROUP=8,
            num_warps=8 if BM == 128 else 4, num_stages=3,
        )  # fmt: skip
    c = c.squeeze(-2) if row else c
    return c.squeeze(-1) if column else c
