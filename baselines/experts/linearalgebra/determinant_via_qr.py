# parts: eliminate
import triton
import triton.language as tl


@triton.jit
def _det_qr(a, y, n, ab, ar, ac, N: tl.constexpr):
    """One matrix per program: the product of R's diagonal, negated for each of the n - 1 reflections."""
    batch = tl.program_id(0).to(tl.int64)
    rows = tl.arange(0, N)
    left = tile(a + batch * ab, rows, rows, n, n, ar, ac)
    product = tl.full((), 1.0, tl.float64)
    for k in range(n - 1):
        v, w, diagonal = mirror(left, rows, rows, k)
        left -= w[:, None] * tl.sum(v[:, None] * left, 0)[None, :]
        product *= -diagonal.to(tl.float64)
    last = tl.sum(tl.where(rows == n - 1, column(left, rows, n - 1), 0.0), 0)
    tl.store(y + batch, (product * last.to(tl.float64)).to(left.dtype))


# For few matrices: compiled once for all sizes and strides, the other once more for every kind of them.
_det_qr_any = triton.jit(_det_qr.fn, do_not_specialize=[p.name for p in _det_qr.params if not p.is_constexpr])


def determinant_via_qr(A, *, mode="reduced", out=None):
    y = target(out, A, A.shape[:-2])
    if y.numel():
        a, *sa = stacked(A)
        n, N = A.shape[-1], pad(A.shape[-1])
        kernel = _det_qr
        if a.shape[0] < 64:
            kernel, N = _det_qr_any, max(16, N)
        kernel[(a.shape[0],)](a, y, n, *sa, N=N, num_warps=warps(N * N))
    return handed(y, out)
