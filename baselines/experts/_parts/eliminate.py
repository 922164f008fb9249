import torch
import triton
import triton.language as tl

# One program holds one small matrix in registers and eliminates column by column. Nothing can be indexed there: a
# row or column is picked by a masked sum, which is exact. Rows stay where they are; pivoting notes their order.


@triton.jit
def tile(a, rows, cols, m, n, sr, sc):
    """Elements (rows, cols) of an (m, n) matrix with strides sr, sc; zeros outside."""
    at = rows[:, None].to(tl.int64) * sr + cols[None, :].to(tl.int64) * sc
    return tl.load(a + at, mask=(rows[:, None] < m) & (cols[None, :] < n), other=0.0)


@triton.jit
def row(a, rows, i):
    return tl.sum(tl.where(rows[:, None] == i, a, 0.0), 0)


@triton.jit
def column(a, cols, j):
    return tl.sum(tl.where(cols[None, :] == j, a, 0.0), 1)


@triton.jit
def choose(x, free, k, PIVOT: tl.constexpr):
    """The row to eliminate with: the largest entry of column x among the free rows, or row k."""
    if PIVOT:
        return tl.argmax(tl.where(free, tl.abs(x), -1.0), 0)
    else:
        return k


@triton.jit
def _solve(a, b, y, n, width, ab, ar, ac, bb, br, bc, N: tl.constexpr, W: tl.constexpr, PIVOT: tl.constexpr):
    """Gauss-Jordan: A becomes a permuted diagonal, without a second pass for back substitution."""
    batch = tl.program_id(0).to(tl.int64)
    rows = tl.arange(0, N)
    cols = tl.program_id(1) * W + tl.arange(0, W)
    left = tile(a + batch * ab, rows, rows, n, n, ar, ac)
    right = tile(b + batch * bb, rows, cols, n, width, br, bc)
    place = tl.full((N,), -1, tl.int32)
    diagonal = tl.full((N,), 1.0, left.dtype)
    for k in range(n):
        x = column(left, rows, k)
        p = choose(x, (place < 0) & (rows < n), k, PIVOT)
        here = rows == p
        pivot = tl.sum(tl.where(here, x, 0.0), 0)
        f = tl.where(here, 0.0, x / pivot)
        left -= f[:, None] * row(left, rows, p)[None, :]
        right -= f[:, None] * row(right, rows, p)[None, :]
        place = tl.where(here, k, place)
        diagonal = tl.where(here, pivot, diagonal)
    right /= diagonal[:, None]
    y += batch * n * width
    inside = (rows[:, None] < n) & (cols[None, :] < width)
    tl.store(y + place[:, None].to(tl.int64) * width + cols[None, :], right, mask=inside)


@triton.jit
def _det(a, y, n, ab, ar, ac, N: tl.constexpr, PIVOT: tl.constexpr):
    """The product of the pivots, negated for every pair of rows that changes places."""
    batch = tl.program_id(0).to(tl.int64)
    rows = tl.arange(0, N)
    left = tile(a + batch * ab, rows, rows, n, n, ar, ac)
    free = (rows < n).to(tl.int32)
    # In fp64, so that a product on its way to a harmless value does not overflow.
    product = tl.full((), 1.0, tl.float64)
    for k in range(n):
        x = column(left, rows, k)
        p = choose(x, free > 0, k, PIVOT)
        pivot = tl.sum(tl.where(rows == p, x, 0.0), 0)
        above = tl.sum(tl.where(rows < p, free, 0), 0)
        product *= tl.where(above % 2 == 1, -pivot, pivot).to(tl.float64)
        free = tl.where(rows == p, 0, free)
        # A zero pivot leaves nothing to eliminate, and the product is zero for good.
        f = tl.where(free > 0, x / tl.where(pivot == 0, 1.0, pivot), 0.0)
        left -= f[:, None] * row(left, rows, p)[None, :]
    tl.store(y + batch, product.to(left.dtype))


@triton.jit
def mirror(a, rows, cols, k):
    """Householder: v and w such that a - w (v^T a) is zero in column k below row k, and what then stands at (k, k)."""
    x = tl.where(rows < k, 0.0, column(a, cols, k))
    # Scaled by the largest, the squares stay in range.
    peak = tl.max(tl.abs(x), 0)
    x /= tl.where(peak > 0, peak, 1.0)
    top = tl.sum(tl.where(rows == k, x, 0.0), 0)
    norm = tl.sqrt(tl.sum(x * x, 0))
    norm = tl.where(top > 0, -norm, norm)
    v = tl.where(rows == k, x - norm, x)
    square = tl.sum(v * v, 0)
    return v, v * (2.0 / tl.where(square > 0, square, 1.0)), norm * peak


@triton.jit
def substitute(t, tr, tc, b, br, bc, x, n, cols, width, LOWER: tl.constexpr, LONG: tl.constexpr, S: tl.constexpr):
    """x = T^-1 b for triangular T, S unknowns at a time; x is contiguous, and may be b."""
    step = tl.arange(0, S)
    blocks = tl.cdiv(n, S)
    for i in range(blocks):
        first = (i if LOWER else blocks - 1 - i) * S
        rows = first + step
        y = tile(b, rows, cols, n, width, br, bc)
        # A small tile is held by several threads at once: none may store into x before all have loaded.
        tl.debug_barrier()
        if LONG:
            for j in range(i):
                others = (j if LOWER else blocks - 1 - j) * S + step
                done = tile(x, others, cols, n, width, width, 1)
                y -= tl.dot(tile(t, rows, others, n, n, tr, tc), done, input_precision="ieee", out_dtype=y.dtype)
        count = tl.minimum(S, n - first)
        for j in range(count):
            k = first + (j if LOWER else count - 1 - j)
            later = (rows > k) if LOWER else (rows < k)
            at = t + k.to(tl.int64) * tc
            f = tl.load(at + rows.to(tl.int64) * tr, mask=later & (rows < n), other=0.0)
            now = row(y, rows, k) / tl.load(at + k.to(tl.int64) * tr)
            y = tl.where(rows[:, None] == k, now[None, :], y - f[:, None] * now[None, :])
        inside = (rows[:, None] < n) & (cols[None, :] < width)
        tl.store(x + rows[:, None].to(tl.int64) * width + cols[None, :], y, mask=inside)
        # The next blocks, held by other threads, read these.
        tl.debug_barrier()


def pad(n, least=1):
    return max(least, triton.next_power_of_2(n))


def stacked(a):
    """A tensor of matrices with one batch axis (a view where the strides allow it), and its strides."""
    a = a.reshape(-1, *a.shape[-2:])
    return (a, *a.stride())


def warps(*tiles):
    """As few as hold the tiles in registers: a sum within one warp needs no barrier."""
    return min(16, pad(sum(tiles) // 1024))


def panel(n, width):
    """For substitute: whether the unknowns take turns, how many at a time, and right-hand sides per program (one warp)."""
    # Larger tiles than 16 x 16 run out of registers beside the products.
    return {"LONG": True, "S": 16, "W": 16} if n > 32 else {"LONG": False, "S": pad(n), "W": min(32, pad(width))}


def target(out, like, shape):
    """Where to write: out itself if it is contiguous."""
    if out is not None and out.is_contiguous():
        return out
    return torch.empty(shape, dtype=like.dtype, device=like.device)


def handed(y, out):
    return y if out is None or y is out else out.copy_(y)


# For few matrices: compiled once for all sizes and strides, the other once more for every kind of them. In many warps,
# because few numbers in each thread are little code.
_solve_any = triton.jit(_solve.fn, do_not_specialize=["n", "width", "ab", "ar", "ac", "bb", "br", "bc"])


def eliminate(A, B, pivot=True):
    """A^-1 B for a batch of matrices A; B holds matrices, or vectors where it has one axis less."""
    y = torch.empty(B.shape, dtype=B.dtype, device=B.device)
    if y.numel():
        n = A.shape[-1]
        a, *sa = stacked(A)
        b, *sb = stacked(B if B.dim() == A.dim() else B.unsqueeze(-1))
        width = b.shape[-1]
        N, W = pad(n), min(32, pad(width))
        kernel, several = _solve, 1
        if a.shape[0] < 64 and (n % 16 or width > 1 or sa[1:] != [n, 1]):
            kernel, several, N, W = _solve_any, 4, max(32, N), 8
        grid = (a.shape[0], triton.cdiv(width, W))
        kernel[grid](a, b, y, n, width, *sa, *sb, N=N, W=W, PIVOT=pivot, num_warps=warps(several * N * (N + W)))
    return y


_det_any = triton.jit(_det.fn, do_not_specialize=[p.name for p in _det.params if not p.is_constexpr])


def determinant(A, pivot=True, out=None):
    y = target(out, A, A.shape[:-2])
    if y.numel():
        a, *sa = stacked(A)
        n, N = A.shape[-1], pad(A.shape[-1])
        kernel = _det
        if a.shape[0] < 64:
            kernel, N = _det_any, max(16, N)
        kernel[(a.shape[0],)](a, y, n, *sa, N=N, PIVOT=pivot, num_warps=warps(N * N))
    return handed(y, out)
