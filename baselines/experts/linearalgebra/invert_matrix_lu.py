# parts: eliminate
import triton
import triton.language as tl


@triton.jit
def _invert(a, y, n, ab, ar, ac, N: tl.constexpr, PIVOT: tl.constexpr):
    """Gauss-Jordan in place: the column of the inverse that step k begins takes the slot of the eliminated column k."""
    batch = tl.program_id(0).to(tl.int64)
    rows = tl.arange(0, N)
    left = tile(a + batch * ab, rows, rows, n, n, ar, ac)
    place = tl.full((N,), -1, tl.int32)
    origin = tl.full((N,), -1, tl.int32)
    diagonal = tl.full((N,), 1.0, left.dtype)
    for k in range(n):
        x = column(left, rows, k)
        p = choose(x, (place < 0) & (rows < n), k, PIVOT)
        here = rows == p
        pivot = tl.sum(tl.where(here, x, 0.0), 0)
        f = tl.where(here, 0.0, x / pivot)
        fresh = tl.where(here, 1.0, -f)
        left = tl.where(rows[None, :] == k, fresh[:, None], left - f[:, None] * row(left, rows, p)[None, :])
        place = tl.where(here, k, place)
        origin = tl.where(rows == k, p, origin)
        diagonal = tl.where(here, pivot, diagonal)
    left /= diagonal[:, None]
    inside = (rows[:, None] < n) & (rows[None, :] < n)
    tl.store(y + batch * n * n + place[:, None] * n + origin[None, :], left, mask=inside)


# For few matrices: compiled once for all sizes and strides, the other once more for every kind of them. In many warps,
# because few numbers in each thread are little code.
_invert_any = triton.jit(_invert.fn, do_not_specialize=[p.name for p in _invert.params if not p.is_constexpr])


def invert_matrix_lu(A, *, pivot=True, out=None):
    y = target(out, A, A.shape)
    if y.numel():
        a, *sa = stacked(A)
        n, N = A.shape[-1], pad(A.shape[-1])
        kernel, several = _invert, 1
        if a.shape[0] < 64:
            kernel, several, N = _invert_any, 4, max(32, N)
        kernel[(a.shape[0],)](a, y, n, *sa, N=N, PIVOT=pivot, num_warps=warps(several * N * N))
    return handed(y, out)
