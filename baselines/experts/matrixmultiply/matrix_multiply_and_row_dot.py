import torch
import triton
import triton.language as tl


@triton.jit
def _two_rows(
    a, b, c, parts, M, P, am, an, bm, bp, cn, cp, alpha, beta, BM: tl.constexpr, BP: tl.constexpr
):  # fmt: skip
    """Both rows of a block of columns, and the block's share of their dot product; b is read once."""
    p = tl.program_id(0) * BP + tl.arange(0, BP)
    first = tl.zeros((BM, BP), tl.float32)
    second = tl.zeros((BM, BP), tl.float32)
    for m0 in range(0, M, BM):
        m = m0 + tl.arange(0, BM)
        tile = tl.load(
            b + m[:, None].to(tl.int64) * bm + p[None, :] * bp, mask=(m[:, None] < M) & (p[None, :] < P), other=0.0
        )
        first += tl.load(a + m * am, mask=m < M, other=0.0)[:, None] * tile
        second += tl.load(a + an + m * am, mask=m < M, other=0.0)[:, None] * tile
    x = alpha * tl.sum(first, 0) + beta * tl.load(c + p * cp, mask=p < P, other=0.0)
    y = alpha * tl.sum(second, 0) + beta * tl.load(c + cn + p * cp, mask=p < P, other=0.0)
    tl.store(parts + tl.program_id(0), tl.sum(x * y, 0))


@triton.jit
def _total(parts, out, n, BLOCK: tl.constexpr):
    total = tl.zeros((BLOCK,), tl.float32)
    for k0 in range(0, n, BLOCK):
        k = k0 + tl.arange(0, BLOCK)
        total += tl.load(parts + k, mask=k < n, other=0.0)
    tl.store(out, tl.sum(total, 0))


def matrix_multiply_and_row_dot(A, B, alpha, beta, C):
    M, P = B.shape
    # Few columns a program, so that there are enough programs for every multiprocessor.
    BP = 32
    n = triton.cdiv(P, BP)
    parts = torch.empty(n, dtype=torch.float32, device=A.device)
    out = torch.empty((), dtype=torch.float32, device=A.device)
    _two_rows[(n,)](
        A, B, C, parts, M, P, A.stride(1), A.stride(0), *B.stride(), *C.stride(), float(alpha), float(beta), BM=128, BP=BP,
        num_warps=4,
    )  # fmt: skip
    _total[(1,)](parts, out, n, BLOCK=256)
    return out
