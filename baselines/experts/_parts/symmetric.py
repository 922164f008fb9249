# Symmetric and Hermitian matrices, real or complex, one per program, in registers. A complex number is two real ones; a
# real kernel passes along a zero as imaginary part, with which nothing is computed. herm, 1 for Hermitian matrices, is no
# constant: it only decides about signs, which is not worth compiling everything twice.


@triton.jit
def load(a, at, inside, CPLX: tl.constexpr):
    if CPLX:
        return tl.load(a + at, mask=inside, other=0.0), tl.load(a + at + 1, mask=inside, other=0.0)
    else:
        return tl.load(a + at, mask=inside, other=0.0), tl.zeros((), a.dtype.element_ty)


@triton.jit
def store(a, at, x, xi, inside, CPLX: tl.constexpr):
    tl.store(a + at, x, mask=inside)
    if CPLX:
        tl.store(a + at + 1, xi, mask=inside)


@triton.jit
def conj(xi, herm, CPLX: tl.constexpr):
    """The imaginary part on the other side of the diagonal."""
    return tl.where(herm != 0, -xi, xi) if CPLX else xi


@triton.jit
def rectangle(a, rows, cols, m, n, sr, sc, CPLX: tl.constexpr):
    """The (m, n) matrix with strides sr, sc; zeros outside."""
    at = rows[:, None].to(tl.int64) * sr + cols[None, :].to(tl.int64) * sc
    return load(a, at, (rows[:, None] < m) & (cols[None, :] < n), CPLX)


@triton.jit
def mirror_image(a, rows, n, sr, sc, herm, CPLX: tl.constexpr):
    """A symmetric or Hermitian matrix transposed: taking a column along the last axis needs hardly any shuffle."""
    x, xi = rectangle(a, rows, rows, n, n, sr, sc, CPLX)
    return x, conj(xi, herm, CPLX)


@triton.jit
def taken(x, xi, rows, i, CPLX: tl.constexpr):
    """Row i of a tile: column i of the matrix, if the tile is its transpose."""
    return row(x, rows, i), row(xi, rows, i) if CPLX else xi


@triton.jit
def pick(x, rows, i):
    return tl.sum(tl.where(rows == i, x, 0), 0)


@triton.jit
def picks(x, xi, rows, i, CPLX: tl.constexpr):
    return pick(x, rows, i), pick(xi, rows, i) if CPLX else xi


@triton.jit
def size(x, xi, CPLX: tl.constexpr):
    return tl.abs(x) + tl.abs(xi) if CPLX else tl.abs(x)


@triton.jit
def times(x, xi, y, yi, CPLX: tl.constexpr):
    if CPLX:
        return x * y - xi * yi, x * yi + xi * y
    else:
        return x * y, xi


@triton.jit
def less(x, xi, y, yi, z, zi, CPLX: tl.constexpr):
    """x - y z."""
    if CPLX:
        return x - y * z + yi * zi, xi - y * zi - yi * z
    else:
        return x - y * z, xi


@triton.jit
def combined(x, xi, y, yi, z, zi, t, ti, CPLX: tl.constexpr):
    """x y + z t."""
    if CPLX:
        return x * y - xi * yi + z * t - zi * ti, x * yi + xi * y + z * ti + zi * t
    else:
        return x * y + z * t, xi


@triton.jit
def rank_one(x, xi, f, fi, g, gi, CPLX: tl.constexpr):
    """x - f g^T."""
    if CPLX:
        return less(x, xi, f[:, None], fi[:, None], g[None, :], gi[None, :], CPLX)
    else:
        return x - f[:, None] * g[None, :], xi


@triton.jit
def inverse(x, xi, CPLX: tl.constexpr):
    """1 / x, scaled so that no square leaves the range."""
    if CPLX:
        m = tl.maximum(tl.abs(x), tl.abs(xi))
        s, t = x / m, xi / m
        q = (s * s + t * t) * m
        return s / q, -t / q
    else:
        return 1.0 / x, xi


@triton.jit
def pivot(x, xi, rows, free, p, CPLX: tl.constexpr):
    """Bunch and Kaufman's choice between row p and the rows that are free after it, which bounds the elements' growth.

    Returns kind, r, and columns p and r. The pivot is element (p, p) (kind 0), element (r, r) (kind 1), or the 2x2
    block of rows p and r (kind 2). x is the matrix transposed.
    """
    ALPHA: tl.constexpr = 0.6403882
    u, ui = taken(x, xi, rows, p, CPLX)
    sizes = size(u, ui, CPLX)
    own = pick(sizes, rows, p)
    top, r = tl.max(tl.where(free, sizes, 0.0), 0, return_indices=True)
    kind = 0
    w, wi = u, ui
    if own < ALPHA * top:
        w, wi = taken(x, xi, rows, r, CPLX)
        sizes = size(w, wi, CPLX)
        rest = tl.max(tl.where((free | (rows == p)) & (rows != r), sizes, 0.0), 0)
        alone = tl.where(pick(sizes, rows, r) >= ALPHA * rest, 1, 2)
        kind = tl.where(own >= ALPHA * top * (top / rest), 0, alone)
    return kind, r, u, ui, w, wi


@triton.jit
def real(xi, herm, CPLX: tl.constexpr):
    """The imaginary part of a number on the diagonal."""
    return tl.where(herm != 0, tl.zeros_like(xi), xi) if CPLX else xi


@triton.jit
def block(u, ui, w, wi, rows, p, r, herm, CPLX: tl.constexpr):
    """(a, b, d) of [[a, b*], [b, d]], the block of rows p and r, and (e, f, h) of its inverse [[e, f*], [f, h]]."""
    a, ai = picks(u, ui, rows, p, CPLX)
    b, bi = picks(u, ui, rows, r, CPLX)
    d, di = picks(w, wi, rows, r, CPLX)
    ai, di = real(ai, herm, CPLX), real(di, herm, CPLX)
    # Relative to b, the largest of them, the determinant can neither overflow nor vanish.
    m = size(b, bi, CPLX)
    e, ei, f, fi, h, hi = d / m, di / m, -b / m, -bi / m, a / m, ai / m
    det, deti = times(e, ei, h, hi, CPLX)
    det, deti = less(det, deti, f, fi, f, conj(fi, herm, CPLX), CPLX)
    det, deti = inverse(det, real(deti, herm, CPLX), CPLX)
    det, deti = det / m, deti / m
    e, ei = times(e, ei, det, deti, CPLX)
    f, fi = times(f, fi, det, deti, CPLX)
    h, hi = times(h, hi, det, deti, CPLX)
    return a, ai, b, bi, d, di, e, ei, f, fi, h, hi


def numbers(a):
    """A batch of matrices as real numbers, and its strides."""
    a = stacked(a)[0]
    a = torch.view_as_real(a) if a.is_complex() else a
    return (a, *a.stride()[:3])
