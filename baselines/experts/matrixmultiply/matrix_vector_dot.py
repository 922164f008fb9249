import torch
import triton
import triton.language as tl


@triton.jit
def _rows(a, x, y, parts, N, an, am, xs, ys, alpha, beta, BN: tl.constexpr, BM: tl.constexpr):
    """BN elements of y, and their share of the dot product; a is read once."""
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    acc = tl.zeros((BN, BM), tl.float32)
    for m0 in range(0, N, BM):
        m = m0 + tl.arange(0, BM)
        tile = tl.load(
            a + n[:, None].to(tl.int64) * an + m[None, :].to(tl.int64) * am,
            mask=(n[:, None] < N) & (m[None, :] < N), other=0.0,
        )  # fmt: skip
        acc += tile * tl.load(x + m * xs, mask=m < N, other=0.0)[None, :]
    new = alpha * tl.sum(acc, 1) + beta * tl.load(y + n * ys, mask=n < N, other=0.0)
    tl.store(y + n * ys, new, mask=n < N)
    tl.store(parts + tl.program_id(0), tl.sum(new * tl.load(x + n * xs, mask=n < N, other=0.0), 0))


@triton.jit
def _total(parts, out, n, BLOCK: tl.constexpr):
    total = tl.zeros((BLOCK,), tl.float32)
    for k0 in range(0, n, BLOCK):
        k = k0 + tl.arange(0, BLOCK)
        total += tl.load(parts + k, mask=k < n, other=0.0)
    tl.store(out, tl.sum(total, 0))


def matrix_vector_dot(A, x, y, alpha, beta):
    N = A.shape[0]
    BN, BM = (4, 1024) if N >= 1024 else (16, 64)
    n = triton.cdiv(N, BN)
    parts = torch.empty(n, dtype=torch.float32, device=A.device)
    out = torch.empty((), dtype=torch.float32, device=A.device)
    _rows[(n,)](
        A, x, y, parts, N, *A.stride(), x.stride(0), y.stride(0), float(alpha), float(beta), BN=BN, BM=BM,
        num_warps=8 if N >= 1024 else 4,
    )  # fmt: skip
    _total[(1,)](parts, out, n, BLOCK=1024)
    return out
