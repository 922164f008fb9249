# parts: eliminate
import torch
import triton
import triton.language as tl


@triton.jit
def _least_squares(a, b, y, m, n, width, ab, ar, ac, bb, br, bc, M: tl.constexpr, N: tl.constexpr, W: tl.constexpr):
    """One matrix per program: reflections turn A into R and b into Q^T b, then R x = Q^T b from the last unknown up."""
    batch = tl.program_id(0).to(tl.int64)
    rows = tl.arange(0, M)
    unknowns = tl.arange(0, N)
    cols = tl.program_id(1) * W + tl.arange(0, W)
    left = tile(a + batch * ab, rows, unknowns, m, n, ar, ac)
    right = tile(b + batch * bb, rows, cols, m, width, br, bc)
    for k in range(n):
        v, w, diagonal = mirror(left, rows, unknowns, k)
        left -= w[:, None] * tl.sum(v[:, None] * left, 0)[None, :]
        right -= w[:, None] * tl.sum(v[:, None] * right, 0)[None, :]
    for j in range(n):
        k = n - 1 - j
        r = column(left, unknowns, k)
        now = row(right, rows, k) / tl.sum(tl.where(rows == k, r, 0.0), 0)
        above = tl.where(rows < k, r, 0.0)
        right = tl.where(rows[:, None] == k, now[None, :], right - above[:, None] * now[None, :])
    y += batch * n * width
    inside = (rows[:, None] < n) & (cols[None, :] < width)
    tl.store(y + rows[:, None].to(tl.int64) * width + cols[None, :], right, mask=inside)


# For few matrices: compiled once for all sizes and strides, the other once more for every kind of them. In many warps,
# because few numbers in each thread are little code.
_least_squares_any = triton.jit(
    _least_squares.fn, do_not_specialize=[p.name for p in _least_squares.params if not p.is_constexpr]
)


def fused_qr_solve(A, b):
    m, n = A.shape[-2:]
    y = torch.empty((*A.shape[:-2], n, b.shape[-1]), dtype=A.dtype, device=A.device)
    if y.numel():
        a, *sa = stacked(A)
        c, *sc = stacked(b)
        width = b.shape[-1]
        M, N, W = pad(m), pad(n), min(32, pad(width))
        kernel, several = _least_squares, 1
        if a.shape[0] < 64:
            kernel, several, M, N, W = _least_squares_any, 4, max(32, M), max(32, N), 8
        kernel[(a.shape[0], triton.cdiv(width, W))](
            a, c, y, m, n, width, *sa, *sc, M=M, N=N, W=W, num_warps=warps(several * M * (N + W))
        )
    return y
