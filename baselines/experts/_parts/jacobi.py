import triton
import triton.language as tl


@triton.jit
def power_of_two(x):
    """The largest power of two below positive x: dividing by it costs no accuracy."""
    if x.dtype == tl.float64:
        return (x.to(tl.int64, bitcast=True) & 0x7FF0000000000000).to(tl.float64, bitcast=True)
    else:
        return (x.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)


@triton.jit
def tall(a, rows, cols, R, C, ar, ac):
    """A matrix as (columns, rows): a column lies along the last axis. Returns it scaled to [1, 2), and the scale."""
    inside = (cols[:, None] < C) & (rows[None, :] < R)
    x = tl.load(a + cols[:, None].to(tl.int64) * ac + rows[None, :].to(tl.int64) * ar, mask=inside, other=0.0)
    peak = tl.max(tl.max(tl.abs(x), 1), 0)
    scale = power_of_two(tl.where(peak > 0, peak, 1.0).to(x.dtype))
    return x / scale, scale


@triton.jit
def rounds(C):
    """The least power of two from C <= 256 on."""
    last = C - 1
    last |= last >> 1
    last |= last >> 2
    last |= last >> 4
    return last + 1


@triton.jit
def orthogonalise(x, cols, flag, end, RP: tl.constexpr, CP: tl.constexpr):
    """One-sided Jacobi: rotates the columns (rows of the tile) until they are orthogonal, W = A V.

    In round r < end column i meets column i ^ r, so with a power of two as end all columns before it meet each other.
    Both partners compute the same rotation with opposite signs, which keeps the whole tile in registers. Returns W and
    its squared norms, 0 for noise.
    """
    wide: tl.constexpr = x.dtype == tl.float64
    EPS: tl.constexpr = 2.3e-16 if wide else 1.2e-7
    # Convergence is quadratic: what starts a sweep this small ends it below rounding.
    DONE: tl.constexpr = 1e-10 if wide else 1e-5
    alpha = tl.sum(x * x, 1)
    # A column that is only rounding noise has no direction; it is left alone.
    tiny = (EPS * EPS * CP) * tl.sum(alpha, 0)
    sweep = 0
    busy = 1
    while (sweep < 20) & (busy > 0):
        worst = tl.zeros((CP,), x.dtype)
        for r in range(1, end):
            mate = cols ^ r
            y = tl.gather(x, tl.broadcast_to(mate[:, None], (CP, RP)), 0)
            alpha = tl.sum(x * x, 1)
            beta = tl.gather(alpha, mate, 0)
            gamma = tl.sum(x * y, 1)
            alive = (alpha > tiny) & (beta > tiny)
            both = tl.where(alive, alpha, 1.0) * tl.where(alive, beta, 1.0)
            cosine = tl.where(alive, tl.abs(gamma) / tl.sqrt(both), 0.0)
            worst = tl.maximum(worst, cosine)
            turn = cosine > 0.5 * EPS
            zeta = (beta - alpha) / (2.0 * tl.where(turn, gamma, 1.0))
            up = (zeta > 0) | ((zeta == 0) & (cols < mate))
            t = tl.where(up, 1.0, -1.0) / (tl.abs(zeta) + tl.sqrt(1.0 + zeta * zeta))
            t = tl.where(turn, t, 0.0).to(x.dtype)
            c = 1.0 / tl.sqrt(1.0 + t * t)
            x = c[:, None] * x - (c * t)[:, None] * y
        # All threads must leave together, though copies of a value may differ in the last bit: one memory cell decides.
        tl.store(flag, (tl.max(worst, 0) > DONE).to(tl.int32))
        tl.debug_barrier()
        busy = tl.load(flag)
        tl.debug_barrier()
        sweep += 1
    square = tl.sum(x * x, 1)
    return x, tl.where(square > tiny, square, 0.0)


@triton.jit
def directions(w, square):
    """The columns at length 1, the left singular vectors; zeros for noise."""
    solid = square > 0
    return tl.where(solid[:, None], w / tl.sqrt(tl.where(solid, square, 1.0))[:, None], 0.0)


@triton.jit
def dot(a, b, spare):
    """a @ b in full precision. A large product is a loop over operands in memory at spare: unrolled in
    registers it takes the compiler seconds."""
    I: tl.constexpr = a.shape[0]
    K: tl.constexpr = a.shape[1]
    J: tl.constexpr = b.shape[1]
    if I * J * K <= 8192:
        return tl.dot(a, b, input_precision="ieee", out_dtype=a.dtype)
    else:
        i = tl.arange(0, I)
        k = tl.arange(0, K)
        j = tl.arange(0, J)
        tl.store(spare + i[:, None] * K + k[None, :], a)
        tl.store(spare + I * K + k[:, None] * J + j[None, :], b)
        tl.debug_barrier()
        y = tl.zeros((I, J), a.dtype)
        for at in range(0, K, 2):
            for step in tl.static_range(2):
                u = tl.load(spare + i * K + (at + step))
                v = tl.load(spare + I * K + (at + step) * J + j)
                y += u[:, None] * v[None, :]
        tl.debug_barrier()
        return y


def sides(A):
    """A batch of matrices seen as tall: (batch, R, C, row stride, column stride, RP, CP, SQUARE, warps), and memory for dot.

    Squares in fp32 have tiles of their own size, in as few warps as hold them. Other matrices share a few tiles, and many
    warps, because four numbers in each thread are little code, which compiles several times as fast.
    """
    m, n = A.shape[-2:]
    R, C, ar, ac = (m, n, n, 1) if m >= n else (n, m, 1, n)
    square = m == n and A.element_size() == 4
    RP, CP = (max(16 if square else 32, triton.next_power_of_2(k)) for k in (R, C))
    batch = A.numel() // max(1, m * n)
    spare = A.new_empty((batch, 2 * RP * RP))
    return batch, R, C, ar, ac, RP, CP, square, min(16, max(1, RP * CP // (1024 if square else 128))), spare
