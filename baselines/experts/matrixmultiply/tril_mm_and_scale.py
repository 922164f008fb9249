import torch
import triton
import triton.language as tl


@triton.jit
def _tril(
    a, b, c, N, P, an, am, bn, bp, scale, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr
):  # fmt: skip
    """Rows of the product need the columns of a up to their own number only: half of the work."""
    # The longest rows first, so that the last programs are short ones.
    row = (tl.cdiv(N, BM) - 1 - tl.program_id(1)) * BM
    m = row + tl.arange(0, BM)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    acc = tl.zeros((BM, BN), tl.float32)
    for k0 in range(0, tl.minimum(row + BM, N), BK):
        k = k0 + tl.arange(0, BK)
        lower = (k[None, :] <= m[:, None]) & (m[:, None] < N)
        x = tl.load(a + m[:, None].to(tl.int64) * an + k[None, :] * am, mask=lower, other=0.0)
        y = tl.load(
            b + k[:, None].to(tl.int64) * bn + n[None, :] * bp, mask=(k[:, None] < N) & (n[None, :] < P), other=0.0
        )
        acc = tl.dot(x, y, acc, input_precision="tf32x3")
    inside = (m[:, None] < N) & (n[None, :] < P)
    tl.store(c + m[:, None].to(tl.int64) * P + n[None, :], acc * scale, mask=inside)


def tril_mm_and_scale(A, B, alpha, beta):
    N, P = B.shape
    c = torch.empty((N, P), dtype=A.dtype, device=A.device)
    if c.numel():
        if N >= 256 and B.stride(0) != 1:
            # Tensor cores read TF32 operands along the depth only: a transposed copy is cheaper than shuffling every tile.
            B = B.mT.contiguous().mT
        BM, BN, BK = (128, 64, 32) if N * P >= 1 << 20 else (64, 32, 32)
        _tril[(triton.cdiv(P, BN), triton.cdiv(N, BM))](
            A, B, c, N, P, *A.stride(), *B.stride(), float(alpha) * float(beta), BM=BM, BN=BN, BK=BK, num_warps=4,
            num_stages=3,
        )  # fmt: skip
    return c
