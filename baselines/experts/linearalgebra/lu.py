import triton
import triton.language as tl


@triton.jit
def _lu(a, p, lower, upper, M, N, sm, sn, k, PIVOT: tl.constexpr, RP: tl.constexpr, CP: tl.constexpr):
    """Gaussian elimination of one matrix by one program, in registers; the multipliers stay below the diagonal."""
    batch = tl.program_id(0).to(tl.int64)
    rows = tl.arange(0, RP)
    cols = tl.arange(0, CP)
    inside = (rows[:, None] < M) & (cols[None, :] < N)
    at = rows[:, None].to(tl.int64) * sm + cols[None, :].to(tl.int64) * sn
    x = tl.load(a + batch * M * N + at, mask=inside, other=0.0)
    origin = rows
    for j in range(k):
        column = tl.sum(tl.where(cols[None, :] == j, x, 0.0), 1)
        pivot_row = tl.sum(tl.where(rows[:, None] == j, x, 0.0), 0)
        if PIVOT:
            # Padding loses against the smallest real candidate.
            best = tl.argmax(tl.where((rows >= j) & (rows < M), tl.abs(column), -1.0), 0)
            old_row = pivot_row
            pivot_row = tl.sum(tl.where(rows[:, None] == best, x, 0.0), 0)
            x = tl.where(rows[:, None] == best, old_row[None, :], x)
            x = tl.where(rows[:, None] == j, pivot_row[None, :], x)
            chosen = tl.sum(tl.where(rows == best, origin, 0), 0)
            former = tl.sum(tl.where(rows == j, origin, 0), 0)
            origin = tl.where(rows == best, former, origin)
            origin = tl.where(rows == j, chosen, origin)
            column = tl.sum(tl.where(cols[None, :] == j, x, 0.0), 1)
        pivot = tl.sum(tl.where(cols == j, pivot_row, 0.0), 0)
        # A column of zeros needs no elimination.
        factor = tl.where((rows > j) & (pivot != 0), column / tl.where(pivot != 0, pivot, 1.0), 0.0)
        x -= factor[:, None] * tl.where(cols > j, pivot_row, 0.0)[None, :]
        x = tl.where((cols[None, :] == j) & (rows[:, None] > j), factor[:, None], x)
    diagonal = rows[:, None] == cols[None, :]
    below = rows[:, None] > cols[None, :]
    at = rows[:, None].to(tl.int64) * k + cols[None, :]
    left = tl.where(below, x, tl.where(diagonal, 1.0, 0.0))
    tl.store(lower + batch * M * k + at, left, mask=(rows[:, None] < M) & (cols[None, :] < k))
    at = rows[:, None].to(tl.int64) * N + cols[None, :]
    right = tl.where(below, 0.0, x)
    tl.store(upper + batch * k * N + at, right, mask=(rows[:, None] < k) & (cols[None, :] < N))
    if PIVOT:
        # Row i of L U is row origin[i] of A.
        square = tl.where(rows[:, None] == origin[None, :], 1.0, 0.0).to(x.dtype)
        real = (rows[:, None] < M) & (rows[None, :] < M)
        tl.store(p + batch * M * M + rows[:, None].to(tl.int64) * M + rows[None, :], square, mask=real)


# For few matrices: compiled once for all sizes and strides, the other once more for every kind of them.
_lu_any = triton.jit(_lu.fn, do_not_specialize=[p.name for p in _lu.params if not p.is_constexpr])


def lu(A, pivot=True, out=None):
    *lead, m, n = A.shape
    k = min(m, n)
    x = A if A.is_contiguous() or A.mT.is_contiguous() else A.contiguous()
    own = out is None or not out.is_contiguous()
    P = A.new_empty((0,)) if not pivot else A.new_empty((*lead, m, m)) if own else out
    L, U = A.new_empty((*lead, m, k)), A.new_empty((*lead, k, n))
    B = A.numel() // max(1, m * n)
    if B:
        RP, CP = triton.next_power_of_2(m), triton.next_power_of_2(n)
        warps = min(16, max(1, RP * CP // 1024))
        kernel = _lu
        if B < 64:
            RP = CP = 16 if max(RP, CP) <= 16 else max(64, RP, CP)
            warps, kernel = min(16, max(1, RP * RP // 512)), _lu_any
        kernel[(B,)](x, P, L, U, m, n, *x.stride()[-2:], k, PIVOT=bool(pivot), RP=RP, CP=CP, num_warps=warps)
    return (P if out is None or not own else out.copy_(P)), L, U
