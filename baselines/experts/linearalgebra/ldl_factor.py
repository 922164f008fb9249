# parts: eliminate, symmetric
import torch
import triton
import triton.language as tl


@triton.jit(do_not_specialize=["herm"])
def _ldl(a, y, pivots, n, ab, ar, ac, yb, yr, yc, herm, CPLX: tl.constexpr, N: tl.constexpr):
    """One program per matrix. Rows stay where they are; place notes where LAPACK would have them by now."""
    batch = tl.program_id(0).to(tl.int64)
    rows = tl.arange(0, N)
    x, xi = mirror_image(a + batch * ab, rows, n, ar, ac, herm, CPLX)
    y += batch * yb
    pivots += batch * n
    place = rows
    k = 0
    while k < n:
        p = pick(rows, place, k)
        kind, r, u, ui, w, wi = pivot(x, xi, rows, place > k, p, CPLX)
        # The chosen row changes places with the one at k, or behind it.
        wide = (kind == 2).to(tl.int32)
        chosen = tl.where(kind == 0, p, r)
        old = pick(place, rows, chosen)
        place = tl.where(place == k + wide, old, place)
        place = tl.where(rows == chosen, k + wide, place)
        later = place > k + wide
        at = y + place.to(tl.int64) * yr + k.to(tl.int64) * yc
        if kind == 2:
            d, di, b, bi, c, ci, e, ei, f, fi, h, hi = block(u, ui, w, wi, rows, p, r, herm, CPLX)
            v, vi = combined(u, ui, e, ei, w, wi, f, fi, CPLX)
            z, zi = combined(u, ui, f, conj(fi, herm, CPLX), w, wi, h, hi, CPLX)
            x, xi = rank_one(x, xi, u, conj(ui, herm, CPLX), v, vi, CPLX)
            x, xi = rank_one(x, xi, w, conj(wi, herm, CPLX), z, zi, CPLX)
            v = tl.where(later, v, tl.where(rows == r, b, tl.where(rows == p, d, 0.0)))
            z = tl.where(later, z, tl.where(rows == r, c, 0.0))
            if CPLX:
                vi = tl.where(later, vi, tl.where(rows == r, bi, tl.where(rows == p, di, 0.0)))
                zi = tl.where(later, zi, tl.where(rows == r, ci, 0.0))
            store(at, 0, v, vi, rows < n, CPLX)
            store(at, yc, z, zi, rows < n, CPLX)
            tl.store(pivots + k, -old - 1)
            tl.store(pivots + k + 1, -old - 1)
        else:
            u = tl.where(kind == 0, u, w)
            if CPLX:
                ui = tl.where(kind == 0, ui, wi)
            d, di = picks(u, ui, rows, chosen, CPLX)
            di = real(di, herm, CPLX)
            e, ei = inverse(d, di, CPLX)
            v, vi = times(u, ui, e, ei, CPLX)
            x, xi = rank_one(x, xi, u, conj(ui, herm, CPLX), v, vi, CPLX)
            v = tl.where(later, v, tl.where(rows == chosen, d, 0.0))
            if CPLX:
                vi = tl.where(later, vi, tl.where(rows == chosen, di, 0.0))
            store(at, 0, v, vi, rows < n, CPLX)
            tl.store(pivots + k, old + 1)
        k += 1 + wide


# For few matrices: compiled once for all sizes and strides, the other once more for every kind of them. In many warps,
# because few numbers in each thread are little code.
_ldl_any = triton.jit(_ldl.fn, do_not_specialize=["n", "ab", "ar", "ac", "yb", "yr", "yc", "herm"])


def ldl_factor(A, hermitian=False, out=None):
    n = A.shape[-1]
    y = target(out, A, A.shape)
    # Returned as torch does, with whole columns in a row.
    factor = y if out is not None else y.mT
    pivots = torch.empty(A.shape[:-1], dtype=torch.int32, device=A.device)
    if y.numel():
        N, complex_, double = pad(n), A.is_complex(), A.dtype == torch.float64
        (a, *sa), (f, *sf) = numbers(A), numbers(factor)
        kernel, several = _ldl, 1
        if a.shape[0] < 64 and (complex_ or double or n % 16 or sa[1:] != [n, 1] or sf[1:] != [1, n]):
            kernel, several, N = _ldl_any, 4, max(64 if double else 32, N)
        kernel[(f.shape[0],)](
            a, f, pivots, n, *sa, *sf, int(hermitian), CPLX=complex_, N=N,
            num_warps=warps(several * (1 + complex_) * N * N),
        )  # fmt: skip
    return handed(factor, out), pivots
