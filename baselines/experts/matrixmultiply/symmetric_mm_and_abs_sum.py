import torch
import triton
import triton.language as tl


@triton.jit
def _tiles(a, c, parts, N, M, an, am, cn, cm, alpha, beta, B: tl.constexpr, BK: tl.constexpr):
    """The share of tile (i, j), i <= j, and of its mirror image: A A^T is symmetric, c is not."""
    i, j = tl.program_id(0), tl.program_id(1)
    if i <= j:
        m = i * B + tl.arange(0, B)
        n = j * B + tl.arange(0, B)
        acc = tl.zeros((B, B), tl.float32)
        left = a + m[:, None].to(tl.int64) * an
        right = a + n[None, :].to(tl.int64) * an
        for k0 in range(0, M, BK):
            k = k0 + tl.arange(0, BK)
            x = tl.load(left + k[None, :] * am, mask=(m[:, None] < N) & (k[None, :] < M), other=0.0)
            y = tl.load(right + k[:, None] * am, mask=(k[:, None] < M) & (n[None, :] < N), other=0.0)
            acc = tl.dot(x, y, acc, input_precision="tf32x3")
        inside = (m[:, None] < N) & (n[None, :] < N)
        z = tl.load(c + m[:, None].to(tl.int64) * cn + n[None, :] * cm, mask=inside, other=0.0)
        total = tl.sum(tl.where(inside, tl.abs(alpha * acc + beta * z), 0.0))
        if i < j:
            z = tl.load(c + n[None, :].to(tl.int64) * cn + m[:, None] * cm, mask=inside, other=0.0)
            total += tl.sum(tl.where(inside, tl.abs(alpha * acc + beta * z), 0.0))
        tl.store(parts + i * tl.num_programs(1) + j, total)
    else:
        tl.store(parts + i * tl.num_programs(1) + j, 0.0)


@triton.jit
def _total(parts, out, n, BLOCK: tl.constexpr):
    total = tl.zeros((BLOCK,), tl.float32)
    for k0 in range(0, n, BLOCK):
        k = k0 + tl.arange(0, BLOCK)
        total += tl.load(parts + k, mask=k < n, other=0.0)
    tl.store(out, tl.sum(total, 0))


def symmetric_mm_and_abs_sum(A, C, alpha, beta):
    N, M = A.shape
    B = 64 if N >= 512 else 32
    tiles = triton.cdiv(N, B)
    parts = torch.empty((tiles, tiles), dtype=torch.float32, device=A.device)
    out = torch.empty((), dtype=torch.float32, device=A.device)
    _tiles[(tiles, tiles)](
        A, C, parts, N, M, *A.stride(), *C.stride(), float(alpha), float(beta), B=B, BK=32, num_warps=4, num_stages=3
    )
    _total[(1,)](parts, out, tiles * tiles, BLOCK=1024)
    return out
