# parts: eliminate, symmetric
import triton
import triton.language as tl


@triton.jit(do_not_specialize=["upper"])
def _cholesky(a, y, n, ab, ar, ac, yb, yr, yc, upper, CPLX: tl.constexpr, N: tl.constexpr):
    """One program per matrix: each column is finished, stored, and its square taken from what is left."""
    batch = tl.program_id(0).to(tl.int64)
    rows = tl.arange(0, N)
    x, xi = rectangle(a + batch * ab, rows, rows, n, n, ar, ac, CPLX)
    if CPLX:  # the transpose of a Hermitian matrix
        xi = -xi
    y += batch * yb + rows.to(tl.int64) * yr
    for k in range(n):
        f, fi = taken(x, xi, rows, k, CPLX)
        root = tl.sqrt(pick(f, rows, k))
        f = tl.where(rows > k, f / root, tl.where(rows == k, root, 0.0))
        if CPLX:
            fi = tl.where(rows > k, fi / root, 0.0)
        # The factor's row of upper=True is the conjugate of the column.
        store(y, 0, f, conj(fi, upper, CPLX), rows < n, CPLX)
        y += yc
        x, xi = rank_one(x, xi, f, -fi, f, fi, CPLX)


# For few matrices: compiled once for all sizes and strides, the other once more for every kind of them. In many warps,
# because few numbers in each thread are little code.
_cholesky_any = triton.jit(_cholesky.fn, do_not_specialize=[p.name for p in _cholesky.params if not p.is_constexpr])


def cholesky(A, upper=False, out=None):
    y = target(out, A, A.shape)
    # Returned as torch does, with whole columns (of L) in a row.
    factor = y if upper or out is not None else y.mT
    if y.numel():
        n, N = A.shape[-1], pad(A.shape[-1])
        (a, *sa), (f, *sf) = numbers(A), numbers(factor.mT if upper else factor)
        parts = 1 + A.is_complex()
        kernel, several = _cholesky, 1
        if f.shape[0] < 64:
            kernel, several, N = _cholesky_any, 4, max(32, N)
        kernel[(f.shape[0],)](
            a, f, n, *sa, *sf, int(upper), CPLX=A.is_complex(), N=N, num_warps=warps(several * parts * N * N)
        )
    return handed(factor, out)
