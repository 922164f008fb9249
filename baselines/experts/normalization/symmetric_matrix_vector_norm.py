"""Rows of the product in one kernel, the norm of the vector in a second one with one program."""

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice


@triton.jit
def _product(A, x, y, N, stride, alpha, beta, BM: tl.constexpr, BN: tl.constexpr):
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    rows = A + m.to(tl.int64)[:, None] * stride
    total = tl.zeros((BM, BN), tl.float32)
    for n0 in range(0, N, BN):
        n = n0 + tl.arange(0, BN)
        a = tl.load(rows + n[None, :], mask=(m < N)[:, None] & (n < N)[None, :], other=0.0)
        total += a * tl.load(x + n, mask=n < N, other=0.0)[None, :]
    v = alpha * tl.sum(total, 1)
    tl.store(y + m, v + beta * v, mask=m < N)


@triton.jit
def _norm(y, out, N, p, KIND: tl.constexpr, BLOCK: tl.constexpr):
    total = tl.zeros((BLOCK,), tl.float32)
    for n0 in range(0, N, BLOCK):
        n = n0 + tl.arange(0, BLOCK)
        v = tl.abs(tl.load(y + n, mask=n < N, other=0.0))
        if KIND == 0:
            total = tl.maximum(total, v)
        elif KIND == 1:
            total += v
        elif KIND == 2:
            total += v * v
        else:
            total += tl.where(n < N, libdevice.pow(v, tl.full((BLOCK,), p, tl.float32)), 0.0)
    if KIND == 0:
        result = tl.max(total, 0)
    elif KIND == 1:
        result = tl.sum(total, 0)
    elif KIND == 2:
        result = tl.sqrt_rn(tl.sum(total, 0))
    else:
        result = libdevice.pow(tl.sum(total, 0), 1.0 / p)
    tl.store(out, result)


def symmetric_matrix_vector_norm(A, x, alpha, beta, p=2.0):
    N = x.numel()
    # The rows of A or its columns, whichever are contiguous: they are the same.
    A = A if A.stride(1) == 1 else A.t() if A.stride(0) == 1 else A.contiguous()
    y = torch.empty((N,), dtype=x.dtype, device=x.device)
    out = torch.empty((), dtype=x.dtype, device=x.device)
    BN = min(1024, triton.next_power_of_2(N))
    BM = 4
    _product[(triton.cdiv(N, BM),)](A, x.contiguous(), y, N, A.stride(0), float(alpha), float(beta), BM=BM, BN=BN)
    kind = 0 if p == float("inf") else int(p) if p in (1, 2) else 3
    BLOCK = 4096 if N > 4096 else 1024
    _norm[(1,)](y, out, N, float(p) if kind else 1.0, KIND=kind, BLOCK=BLOCK, num_warps=8)
    return out
