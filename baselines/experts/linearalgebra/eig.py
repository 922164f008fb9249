import torch
import triton
import triton.language as tl


@triton.jit
def _hessenberg(a, work, n, N: tl.constexpr):
    """A = Z H Z^T by Householder reflections, one matrix per program, all in fp64 registers.

    work holds for each matrix the complex N x N matrices H and Z, the size of H and room for N rotations.
    """
    b = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, N)
    i, j = k[:, None], k[None, :]
    h = tl.load(a + b * n * n + i * n + j, mask=(i < n) & (j < n), other=0.0).to(tl.float64)
    z = tl.where(i == j, 1.0, 0.0).to(tl.float64)
    for p in range(n - 2):
        x = tl.sum(tl.where((j == p) & (i > p), h, 0.0), 1)
        head = tl.sum(tl.where(k == p + 1, x, 0.0), 0)
        norm = tl.sqrt(tl.sum(x * x, 0))
        v = tl.where(k == p + 1, x + tl.where(head < 0, -norm, norm), x)
        square = tl.sum(v * v, 0)
        beta = tl.where(square > 0, 2.0 / tl.where(square > 0, square, 1.0), 0.0)
        h -= v[:, None] * (beta * tl.sum(v[:, None] * h, 0))[None, :]
        h -= (beta * tl.sum(h * v[None, :], 1))[:, None] * v[None, :]
        z -= (beta * tl.sum(z * v[None, :], 1))[:, None] * v[None, :]
    work += b * (4 * N * N + 4 * N)
    pair = tl.arange(0, 2)[None, None, :]
    at = work + 2 * (i * N + j)[:, :, None] + pair
    h = tl.where(i <= j + 1, h, 0.0)
    tl.store(at, tl.join(h, tl.zeros_like(h)))
    tl.store(at + 2 * N * N, tl.join(z, tl.zeros_like(z)))
    # What is small beside this is no more than rounding.
    tl.store(work + 4 * N * N, tl.max(tl.max(tl.abs(h), 1), 0))


@triton.jit
def _root(x, y):
    """The square root of x + i y."""
    s = tl.sqrt(0.5 * (tl.sqrt(x * x + y * y) + tl.abs(x)))
    t = tl.where(s > 0, 0.5 * y / tl.where(s > 0, s, 1.0), 0.0)
    return tl.where(x >= 0, s, tl.abs(t)), tl.where(x >= 0, t, tl.where(y < 0, -s, s))


@triton.jit
def _divide(a, b, c, d):
    """(a + i b) / (c + i d), 0 where the divisor is 0."""
    square = c * c + d * d
    over = tl.where(square > 0, 1.0 / tl.where(square > 0, square, 1.0), 0.0)
    return (a * c + b * d) * over, (b * c - a * d) * over


@triton.jit
def _number(at):
    return tl.load(at), tl.load(at + 1)


@triton.jit
def _wilkinson(last, N: tl.constexpr):
    """The eigenvalue of the 2 x 2 block ending at last that is closer to its last element."""
    dr, di = _number(last)
    cr, ci = _number(last - 2)
    br, bi = _number(last - 2 * N)
    ar, ai = _number(last - 2 * N - 2)
    er, ei = 0.5 * (ar - dr), 0.5 * (ai - di)
    pr, pi = br * cr - bi * ci, br * ci + bi * cr
    rr, ri = _root(er * er - ei * ei + pr, 2.0 * er * ei + pi)
    flip = tl.where(er * rr + ei * ri < 0, -1.0, 1.0)
    qr, qi = _divide(pr, pi, er + flip * rr, ei + flip * ri)
    return dr - qr, di - qi


# n = 1 would become a constant, and a loop without end conditions is more than the compiler of Triton 3.6 can take.
@triton.jit(do_not_specialize=["n"])
def _schur(work, n, N: tl.constexpr):
    """H = Q T Q^H with triangular T by QR steps with one complex shift; Z becomes Z Q. One warp per matrix."""
    h = work + tl.program_id(0).to(tl.int64) * (4 * N * N + 4 * N)
    turns = h + 4 * N * N
    tiny = 1.1e-16 * tl.load(turns)
    k = tl.arange(0, N)
    # Z lies below H: their columns, seen as one, turn alike.
    both = tl.arange(0, 2 * N)[:, None]
    pair = tl.arange(0, 2)[None, :]
    diagonal = h + 2 * (k * N + k)[:, None] + pair
    first, second = tl.arange(0, 4) == 0, tl.arange(0, 4) == 1
    hi = n - 1
    tries, total = 0, 0
    sum_r, sum_i = tiny * 0.0, tiny * 0.0
    while (hi > 0) & (total < 40 * n):
        total += 1
        # lo: the last row up to hi whose element left of the diagonal is negligible.
        inner = (k > 0) & (k <= hi)
        below = tl.sum(tl.abs(tl.load(diagonal - 2, mask=inner[:, None], other=0.0)), 1)
        lo = tl.max(tl.where(inner & (below <= tiny), k, 0), 0)
        if lo == hi:
            hi -= 1
            tries = 0
        else:
            tries += 1
            end = h + 2 * (hi * N + hi)
            mr, mi = _wilkinson(end, N)
            if tries % 6 == 0:
                # Symmetric patterns (a cyclic permutation) can stand still under the usual shift.
                size = tl.abs(tl.load(end - 2)) + tl.abs(tl.load(end - 1))
                mr, mi = mr + 0.75 * size, mi + 0.4375 * size
            sum_r, sum_i = sum_r + mr, sum_i + mi
            tl.debug_barrier()
            tl.store(diagonal, tl.load(diagonal) - tl.where(pair == 0, mr, mi))
            tl.store(h + 2 * (lo * N + lo) - 2 + tl.arange(0, 2), tl.zeros((2,), tl.float64), mask=lo > 0)
            tl.debug_barrier()
            # Rows: rotations from the left make H triangular. The unfinished row stays in registers. Numbers are kept
            # as pairs (re, im); beside each is the same times i.
            row = h + 2 * (lo * N + k)[:, None] + pair
            p = tl.load(row)
            for r in range(lo, hi):
                m = tl.load(row + 2 * N)
                pr, pi = tl.split(p)
                nr, ni = tl.split(m)
                on = k == r
                ar, ai = tl.sum(tl.where(on, pr, 0.0), 0), tl.sum(tl.where(on, pi, 0.0), 0)
                br, bi = tl.sum(tl.where(on, nr, 0.0), 0), tl.sum(tl.where(on, ni, 0.0), 0)
                # c = |a| / length and s = a b* / (|a| length); where a is 0, the rows change places.
                head = ar * ar + ai * ai
                square = head * (head + br * br + bi * bi)
                apart = square > 0
                over = tl.where(apart, 1.0 / tl.sqrt(tl.where(apart, square, 1.0)), 0.0)
                c = head * over
                sr = tl.where(apart, (ar * br + ai * bi) * over, 1.0)
                si = (ai * br - ar * bi) * over
                tl.store(row, c * p + sr * m + si * tl.join(-ni, nr))
                tl.store(turns + 4 * r + tl.arange(0, 4), tl.where(first, c, tl.where(second, sr, si)))
                p = c * m - sr * p + si * tl.join(-pi, pr)
                row += 2 * N
            tl.store(row, p)
            tl.debug_barrier()
            # Columns: their adjoints from the right.
            column = h + 2 * (both * N + lo) + pair
            p = tl.load(column)
            for r in range(lo, hi):
                m = tl.load(column + 2)
                pr, pi = tl.split(p)
                nr, ni = tl.split(m)
                c, sr, si = tl.load(turns + 4 * r), tl.load(turns + 4 * r + 1), tl.load(turns + 4 * r + 2)
                tl.store(column, c * p + sr * m - si * tl.join(-ni, nr))
                p = c * m - sr * p - si * tl.join(-pi, pr)
                column += 2
            tl.store(column, p)
        tl.debug_barrier()
    tl.store(diagonal, tl.load(diagonal) + tl.where(pair == 0, sum_r, sum_i))


# Of n only the masks at the end depend.
@triton.jit(do_not_specialize=["n"])
def _vectors(work, w, v, n, N: tl.constexpr):
    """Eigenvectors of T by back substitution, all columns at once, turned by Z and scaled to length 1."""
    b = tl.program_id(0).to(tl.int64)
    h = work + b * (4 * N * N + 4 * N)
    k = tl.arange(0, N)
    i, j = k[:, None], k[None, :]
    pair = tl.arange(0, 2)
    wr, wi = tl.split(tl.load(h + 2 * (k * N + k)[:, None] + pair[None, :]))
    square = h + 2 * (i * N + j)[:, :, None] + pair[None, None, :]
    t = tl.where((j >= i)[:, :, None], tl.load(square), 0.0)
    # Equal eigenvalues are taken as this much apart.
    least = tl.maximum(2.2e-16 * tl.max(tl.max(tl.max(tl.abs(t), 2), 1), 0), 1e-290)
    xr = tl.where(i == j, 1.0, 0.0).to(tl.float64)
    xi = tl.zeros_like(xr)
    for back in range(n - 1):
        r = n - 2 - back
        # Only the elements right of the diagonal: those below it are rounding noise.
        tr, ti = tl.split(tl.load(h + 2 * (r * N + k)[:, None] + pair[None, :], mask=(k > r)[:, None], other=0.0))
        sr = tl.sum(tr[:, None] * xr - ti[:, None] * xi, 0)
        si = tl.sum(tr[:, None] * xi + ti[:, None] * xr, 0)
        dr, di = wr - tl.load(h + 2 * (r * N + r)), wi - tl.load(h + 2 * (r * N + r) + 1)
        near = tl.abs(dr) + tl.abs(di) < least
        yr, yi = _divide(sr, si, tl.where(near, least, dr), tl.where(near, 0.0, di))
        # Two equal eigenvalues coupled by rounding noise alone have independent vectors.
        noise = (tl.abs(dr) + tl.abs(di) < 32.0 * least) & (tl.abs(sr) + tl.abs(si) < 8.0 * least)
        wanted = (k > r) & (k < n) & ~noise
        yr, yi = tl.where(wanted, yr, 0.0), tl.where(wanted, yi, 0.0)
        new = (i == r) & (j > r)
        xr, xi = tl.where(new, yr[None, :], xr), tl.where(new, yi[None, :], xi)
        # Vectors of nearly equal eigenvalues grow; only their direction matters.
        peak = tl.abs(yr) + tl.abs(yi)
        shrink = tl.where(peak > 1e50, 1.0 / tl.maximum(peak, 1.0), 1.0)
        xr, xi = xr * shrink[None, :], xi * shrink[None, :]
    zr, zi = tl.split(tl.load(square + 2 * N * N))
    vr = tl.dot(zr, xr, out_dtype=tl.float64) - tl.dot(zi, xi, out_dtype=tl.float64)
    vi = tl.dot(zr, xi, out_dtype=tl.float64) + tl.dot(zi, xr, out_dtype=tl.float64)
    over = 1.0 / tl.sqrt(tl.sum(vr * vr + vi * vi, 0))
    tl.store(w + b * 2 * n + 2 * i + pair[None, :], tl.join(wr, wi), mask=i < n)
    to = v + b * 2 * n * n + 2 * (i * n + j)[:, :, None] + pair[None, None, :]
    tl.store(to, tl.join(vr * over[None, :], vi * over[None, :]), mask=((i < n) & (j < n))[:, :, None])


# For n that 16 does not divide: compiled once for all of them. With the other one the compiler knows that a row of A is
# whole vectors, and spreads the tile over the threads accordingly.
_hessenberg_any = triton.jit(_hessenberg.fn, do_not_specialize=["n"])


def eig(A):
    n = A.shape[-1]
    x = A.contiguous()
    kind = torch.complex128 if A.dtype == torch.float64 else torch.complex64
    w = torch.empty(A.shape[:-1], dtype=kind, device=A.device)
    v = torch.empty(A.shape, dtype=kind, device=A.device)
    if A.numel():
        B, N = A.numel() // (n * n), max(16, triton.next_power_of_2(n))
        work = torch.empty((B, 4 * N * N + 4 * N), dtype=torch.float64, device=A.device)
        # Numbers that several threads hold must be equal in all of them, which contraction to a * b + c would spoil.
        wide = {"N": N, "num_warps": min(16, max(1, N * N // 512)), "enable_fp_fusion": False}
        hessenberg = _hessenberg if n % 16 == 0 and A.dtype == torch.float32 else _hessenberg_any
        hessenberg[(B,)](x, work, n, **wide)
        _schur[(B,)](work, n, N=N, num_warps=1, enable_fp_fusion=False)
        _vectors[(B,)](work, torch.view_as_real(w), torch.view_as_real(v), n, **wide)
    return w, v
