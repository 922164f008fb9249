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


@triton.jit(do_not_specialize=["mixed", "herm"])
def _solve_symmetric(
    a, b, y, n, width, ab, ar, ac, bb, br, bc, yb, yr, yc, mixed, herm, CPLX: tl.constexpr, N: tl.constexpr, W: tl.constexpr
):  # fmt: skip
    """Gauss-Jordan with 1x1 and 2x2 pivots: what is left stays symmetric, so that a column is also a row.

    mixed is 1 for real right-hand sides of complex matrices.
    """
    batch = tl.program_id(0).to(tl.int64)
    rows = tl.arange(0, N)
    cols = tl.program_id(1) * W + tl.arange(0, W)
    x, xi = mirror_image(a + batch * ab, rows, n, ar, ac, herm, CPLX)
    z, zi = rectangle(b + batch * bb, rows, cols, n, width, br, bc, False)
    if CPLX:
        zi = rectangle(b + batch * bb + 1, rows, cols, tl.where(mixed != 0, 0, n), width, br, bc, False)[0]
    free = (rows < n).to(tl.int32)
    left = n
    while left > 0:
        p = tl.argmax(free, 0)
        free = tl.where(rows == p, 0, free)
        kind, r, u, ui, w, wi = pivot(x, xi, rows, free > 0, p, CPLX)
        if kind == 2:
            _, _, _, _, _, _, e, ei, f, fi, h, hi = block(u, ui, w, wi, rows, p, r, herm, CPLX)
            # The inverse of the block times rows p and r, which are the columns mirrored.
            g, gi = combined(u, conj(ui, herm, CPLX), e, ei, w, conj(wi, herm, CPLX), f, conj(fi, herm, CPLX), CPLX)
            q, qi = combined(u, conj(ui, herm, CPLX), f, fi, w, conj(wi, herm, CPLX), h, hi, CPLX)
            s, si = taken(z, zi, rows, p, CPLX)
            t, ti = taken(z, zi, rows, r, CPLX)
            v, vi = combined(s, si, e, ei, t, ti, f, conj(fi, herm, CPLX), CPLX)
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
            e, ei = inverse(d, real(di, herm, CPLX), CPLX)
            g, gi = times(u, conj(ui, herm, CPLX), e, ei, CPLX)
            s, si = taken(z, zi, rows, chosen, CPLX)
            v, vi = times(s, si, e, ei, CPLX)
            x, xi = rank_one(x, xi, g, gi, u, ui, CPLX)
            z, zi = rank_one(z, zi, u, ui, v, vi, CPLX)
            x, xi = _set_column(x, xi, rows, chosen, g, gi, CPLX)
            z, zi = _set_row(z, zi, rows, chosen, v, vi, CPLX)
            left -= 1
    at = rows[:, None].to(tl.int64) * yr + cols[None, :] * yc
    store(y + batch * yb, at, z, zi, (rows[:, None] < n) & (cols[None, :] < width), CPLX)


# For few matrices: compiled once for all sizes and strides, the other once more for every kind of them. In many warps,
# because few numbers in each thread are little code.
_solve_any = triton.jit(
    _solve_symmetric.fn, do_not_specialize="n width ab ar ac bb br bc yb yr yc mixed herm".split()
)


def solve_symmetric_ldl(A, b, hermitian=False, out=None):
    y = target(out, A, b.shape)
    if y.numel():
        vectors = b.dim() < A.dim()
        (a, *sa), (c, *sc), (z, *sz) = (numbers(x) for x in (A, *(x.unsqueeze(-1) if vectors else x for x in (b, y))))
        n, width, N = A.shape[-1], c.shape[2], pad(A.shape[-1])
        W = min(32, pad(width))
        complex_, mixed = A.is_complex(), A.is_complex() and not b.is_complex()
        kernel, several = _solve_symmetric, 1
        if a.shape[0] < 64 and (complex_ or n % 16 or width > 1 or sa[1:] != [n, 1] or sc[1] != 1):
            kernel, several, N, W = _solve_any, 4, max(32, N), 8
        kernel[(a.shape[0], triton.cdiv(width, W))](
            a, c, z, n, width, *sa, *sc, *sz, int(mixed), int(hermitian), CPLX=complex_, N=N, W=W,
            num_warps=warps(several * (1 + complex_) * N * N, several * (1 + complex_) * N * W),
        )  # fmt: skip
    return handed(y, out)
