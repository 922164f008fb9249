# parts: eliminate, symmetric
import triton
import triton.language as tl


@triton.jit
def _set_row(x, xi, rows, p, y, yi, CPLX: tl.constexpr):
    here = rows[:, None] == p
    return tl.where(here, y[None, :], x), tl.where(here, yi[None, :], xi) if CPLX else xi


@triton.jit
def _set_column(x, xi, rows, p, y, yi, CPLX: tl.constexpr):
    here = rows[None, :] == p
    return tl.where(here, y[:, None], x), tl.where(here, yi[:, None], xi) if CPLX else xi


@triton.jit
def _solve_symmetric(
    a, b, y, n, width, ab, ar, ac, bb, br, bc, yb, yr, yc,
    CPLX: tl.constexpr, MIXED: tl.constexpr, HERM: tl.constexpr, N: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """Gauss-Jordan with 1x1 and 2x2 pivots: what is left stays symmetric, so that a column is also a row."""
    batch = tl.program_id(0).to(tl.int64)
    rows = tl.arange(0, N)
    cols = tl.program_id(1) * W + tl.arange(0, W)
    x, xi = mirror_image(a + batch * ab, rows, n, ar, ac, CPLX, HERM)
    z, zi = rectangle(b + batch * bb, rows, cols, n, width, br, bc, CPLX and not MIXED)
    if MIXED:
        zi = tl.zeros_like(z)
    free = (rows < n).to(tl.int32)
    left = n
    while left > 0:
        p = tl.argmax(free, 0)
        free = tl.where(rows == p, 0, free)
        kind, r, u, ui, w, wi = pivot(x, xi, rows, free > 0, p, CPLX)
        if kind == 2:
            _, _, _, _, _, _, e, ei, f, fi, h, hi = block(u, ui, w, wi, rows, p, r, CPLX, HERM)
            # The inverse of the block times rows p and r, which are the columns mirrored.
            g, gi = combined(u, conj(ui, HERM), e, ei, w, conj(wi, HERM), f, conj(fi, HERM), CPLX)
            q, qi = combined(u, conj(ui, HERM), f, fi, w, conj(wi, HERM), h, hi, CPLX)
            s, si = taken(z, zi, rows, p, CPLX)
            t, ti = taken(z, zi, rows, r, CPLX)
            v, vi = combined(s, si, e, ei, t, ti, f, conj(fi, HERM), CPLX)
            t, ti = combined(s, si, f, fi, t, ti, h, hi, CPLX)
            x, xi = rank_one(x, xi, g, gi, u, ui, CPLX)
            x, xi = rank_one(x, xi, q, qi, w, wi, CPLX)
            z, zi = rank_one(z, zi, u, ui, v, vi, CPLX)
            z, zi = rank_one(z, zi, w, wi, t, ti, CPLX)
            x, xi = _set_column(x, xi, rows, p, g, gi, CPLX)
            x, xi = _set_column(x, xi, rows, r, q, qi, CPLX)
            z, zi = _set_row(z, zi, rows, p, v, vi, CPLX)
            z, zi = _set_row(z, zi, rows, r, t, ti, CPLX)
            free = tl.where(rows == r, 0, free)
            left -= 2
        else:
            chosen = tl.where(kind == 0, p, r)
            u = tl.where(kind == 0, u, w)
            if CPLX:
                ui = tl.where(kind == 0, ui, wi)
            free = tl.where(rows == p, kind, tl.where(rows == chosen, 0, free))
            d, di = picks(u, ui, rows, chosen, CPLX)
            e, ei = inverse(d, real(di, HERM), CPLX)
            g, gi = times(u, conj(ui, HERM), e, ei, CPLX)
            s, si = taken(z, zi, rows, chosen, CPLX)
            v, vi = times(s, si, e, ei, CPLX)
            x, xi = rank_one(x, xi, g, gi, u, ui, CPLX)
            z, zi = rank_one(z, zi, u, ui, v, vi, CPLX)
            x, xi = _set_column(x, xi, rows, chosen, g, gi, CPLX)
            z, zi = _set_row(z, zi, rows, chosen, v, vi, CPLX)
            left -= 1
    at = rows[:, None].to(tl.int64) * yr + cols[None, :] * yc
    store(y + batch * yb, at, z, zi, (rows[:, None] < n) & (cols[None, :] < width), CPLX)


# For few matrices: compiled once for all sizes and strides, the other once more for every kind of them.
_solve_any = triton.jit(
    _solve_symmetric.fn, do_not_specialize=["n", "width", "ab", "ar", "ac", "bb", "br", "bc", "yb", "yr", "yc"]
)


def solve_symmetric_ldl(A, b, hermitian=False, out=None):
    y = target(out, A, b.shape)
    if y.numel():
        vectors = b.dim() < A.dim()
        (a, *sa), (c, *sc), (z, *sz) = (numbers(x) for x in (A, *(x.unsqueeze(-1) if vectors else x for x in (b, y))))
        n, width, N = A.shape[-1], c.shape[2], pad(A.shape[-1])
        W = min(32, pad(width))
        complex_, mixed = A.is_complex(), A.is_complex() and not b.is_complex()
        kernel = _solve_symmetric
        if a.shape[0] < 64 and (complex_ or n % 16 or width > 1 or sa[1:] != [n, 1] or sc[1] != 1):
            kernel, N, W = _solve_any, max(32 if complex_ else 16, N), 8 if width <= 8 else 32
        kernel[(a.shape[0], triton.cdiv(width, W))](
            a, c, z, n, width, *sa, *sc, *sz, CPLX=complex_, MIXED=mixed, HERM=complex_ and bool(hermitian), N=N, W=W,
            num_warps=warps((1 + complex_) * N * N, (1 + complex_) * N * W),
        )  # fmt: skip
    return handed(y, out)
