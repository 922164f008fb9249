import torch
import triton
import triton.language as tl


@triton.jit
def _jacobi(
    a,
    w,
    v,
    u,
    s,
    long,
    short,
    R,
    C,
    ar,
    ac,
    ab,
    width,
    ls_r,
    ls_c,
    lb,
    ss_r,
    ss_c,
    RP: tl.constexpr,
    CP: tl.constexpr,
    SWEEPS: tl.constexpr,
):
    """One-sided Jacobi of one tall matrix (R rows, C <= R columns) by one program.

    w holds its columns (CP, RP), v the rotations (CP, CP), u the left basis (RP, RP); a column is a row of these buffers.
    Each round rotates CP / 2 disjoint pairs at once, in the order of a round-robin tournament.
    """
    batch = tl.program_id(0).to(tl.int64)
    a += batch * ab
    w += batch * CP * RP
    v += batch * CP * CP
    u += batch * RP * RP
    rows = tl.arange(0, RP)
    cols = tl.arange(0, CP)
    inside = (cols[:, None] < C) & (rows[None, :] < R)
    start = tl.load(a + cols[:, None] * ac + rows[None, :] * ar, mask=inside, other=0.0)
    # A power-of-two scale keeps the squares in range and costs no accuracy.
    peak = tl.max(tl.max(tl.abs(start), 1), 0)
    scale = tl.exp2(tl.floor(tl.log2(tl.where(peak > 0, peak, 1.0))))
    start = start / scale
    tl.store(w + cols[:, None] * RP + rows[None, :], start)
    tl.store(v + cols[:, None] * CP + cols[None, :], tl.where(cols[:, None] == cols[None, :], 1.0, 0.0))
    tiny = 1e-12 * tl.sum(tl.sum(start * start, 1), 0) + 1e-37
    tl.debug_barrier()

    half = tl.arange(0, CP // 2)
    players = CP - 1
    off = 1.0
    sweep = 0
    while (sweep < SWEEPS) & (off > 2e-7):
        off = 0.0
        for turn in range(players):
            p = tl.where(half == 0, players, (turn + half) % players)
            q = (turn - half + players) % players
            x = tl.load(w + p[:, None] * RP + rows[None, :])
            y = tl.load(w + q[:, None] * RP + rows[None, :])
            alpha, beta, gamma = tl.sum(x * x, 1), tl.sum(y * y, 1), tl.sum(x * y, 1)
            # A column that is only rounding noise is left alone: its direction is replaced below.
            alive = (alpha > tiny) & (beta > tiny)
            cosine = tl.where(
                alive, tl.abs(gamma) / tl.sqrt(tl.where(alive, alpha, 1.0) * tl.where(alive, beta, 1.0)), 0.0
            )
            turnable = cosine > 5e-8
            off = tl.maximum(off, tl.max(cosine, 0))
            zeta = (beta - alpha) / (2.0 * tl.where(turnable, gamma, 1.0))
            t = tl.where(zeta >= 0, 1.0, -1.0) / (tl.abs(zeta) + tl.sqrt(1.0 + zeta * zeta))
            cs = 1.0 / tl.sqrt(1.0 + t * t)
            cs, sn = tl.where(turnable, cs, 1.0), tl.where(turnable, cs * t, 0.0)
            # A small tile is held by several warps at once: none may store before all have loaded, or they disagree
            # on `off` and leave the loop at different times.
            tl.debug_barrier()
            tl.store(w + p[:, None] * RP + rows[None, :], cs[:, None] * x - sn[:, None] * y)
            tl.store(w + q[:, None] * RP + rows[None, :], sn[:, None] * x + cs[:, None] * y)
            x = tl.load(v + p[:, None] * CP + cols[None, :])
            y = tl.load(v + q[:, None] * CP + cols[None, :])
            tl.debug_barrier()
            tl.store(v + p[:, None] * CP + cols[None, :], cs[:, None] * x - sn[:, None] * y)
            tl.store(v + q[:, None] * CP + cols[None, :], sn[:, None] * x + cs[:, None] * y)
            tl.debug_barrier()
        sweep += 1

    # Sort by norm: the rank of a column is the number of larger ones. Padding goes last.
    done = tl.load(w + cols[:, None] * RP + rows[None, :])
    square = tl.where(cols < C, tl.sum(done * done, 1), -1.0)
    tl.store(u + cols, square)
    tl.debug_barrier()
    other = tl.load(u + cols)
    larger = (other[None, :] > square[:, None]) | (
        (other[None, :] == square[:, None]) & (cols[None, :] < cols[:, None])
    )
    rank = tl.sum(larger.to(tl.int32), 1)
    norm = tl.sqrt(tl.maximum(square, 0.0))
    tl.store(s + batch * C + rank, norm * scale, mask=cols < C)
    turned = tl.load(v + cols[:, None] * CP + cols[None, :])
    real = (cols[:, None] < C) & (cols[None, :] < C)
    tl.store(short + batch * C * C + rank[:, None] * ss_c + cols[None, :] * ss_r, turned, mask=real)
    tl.debug_barrier()

    solid = square > tiny
    found = tl.sum(solid.to(tl.int32), 0)
    tl.store(u + rows[:, None] * RP + rows[None, :], tl.zeros((RP, RP), tl.float32))
    tl.debug_barrier()
    unit = done / tl.where(solid, norm, 1.0)[:, None]
    tl.store(u + rank[:, None] * RP + rows[None, :], unit, mask=solid[:, None] & (cols[:, None] < RP))
    tl.debug_barrier()
    # Complete the basis: the unit vector that is worst represented, orthogonalised three times.
    for c in range(found, width):
        basis = tl.load(u + rows[:, None] * RP + rows[None, :])
        left = tl.where(rows < R, 1.0 - tl.sum(basis * basis, 0), -1.0)
        best = tl.argmax(left, 0)
        new = tl.where(rows == best, 1.0, 0.0)
        for _ in range(3):
            along = tl.sum(basis * new[None, :], 1)
            new = new - tl.sum(basis * along[:, None], 0)
            new = new / tl.sqrt(tl.sum(new * new, 0))
        tl.debug_barrier()
        tl.store(u + c * RP + rows, new)
        tl.debug_barrier()
    basis = tl.load(u + rows[:, None] * RP + rows[None, :])
    wanted = (rows[:, None] < width) & (rows[None, :] < R)
    tl.store(long + batch * lb + rows[:, None] * ls_c + rows[None, :] * ls_r, basis, mask=wanted)


# For few matrices: compiled once for all sizes and strides, the other once more for every kind of them.
_jacobi_any = triton.jit(_jacobi.fn, do_not_specialize=[p.name for p in _jacobi.params if not p.is_constexpr])


def svd(A, full_matrices=True):
    m, n = A.shape[-2:]
    lead = A.shape[:-2]
    x = A.contiguous().view(-1, m, n)
    B, k, R = x.shape[0], min(m, n), max(m, n)
    width = R if full_matrices else k
    empty = lambda *size: torch.empty(size, dtype=A.dtype, device=A.device)  # noqa: E731
    S = empty(*lead, k)
    U = empty(*lead, m, m if full_matrices else k)
    Vh = empty(*lead, n if full_matrices else k, n)
    if B == 0:
        return U, S, Vh
    tall = m >= n
    CP, RP = max(2, triton.next_power_of_2(k)), max(2, triton.next_power_of_2(R))
    # A wide matrix is decomposed through its transpose: the bases change places.
    long, short = (U, Vh) if tall else (Vh, U)
    ar, ac = (n, 1) if tall else (1, n)
    ls_r, ls_c = (width, 1) if tall else (1, R)
    ss_r, ss_c = (1, k) if tall else (k, 1)
    kernel = _jacobi
    if B < 64 and (m != n or m % 4):
        kernel, CP, RP = _jacobi_any, max(16, CP), max(32, RP)
    kernel[(B,)](
        x, empty(B, CP, RP), empty(B, CP, CP), empty(B, RP, RP), S, long, short, R, k, ar, ac, m * n, width,
        ls_r, ls_c, R * width, ss_r, ss_c, RP=RP, CP=CP, SWEEPS=16,
        num_warps=1 if RP <= 16 else 4 if RP <= 64 else 8,
        # Threads that hold the same element sum x * x in opposite orders. Fused into a multiply-add that rounds
        # differently for each of them; then they disagree on `off`, leave the loop at different times and wait at
        # different barriers for ever.
        enable_fp_fusion=False,
    )  # fmt: skip
    return U, S, Vh
