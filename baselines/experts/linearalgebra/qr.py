import triton
import triton.language as tl


@triton.jit
def _qr(a, q, r, M, N, sm, sn, k, qn, rm, WANTED: tl.constexpr, RP: tl.constexpr, CP: tl.constexpr, QP: tl.constexpr):
    """Householder QR of one matrix by one program, in registers; the reflectors stay below the diagonal."""
    batch = tl.program_id(0).to(tl.int64)
    rows = tl.arange(0, RP)
    cols = tl.arange(0, CP)
    inside = (rows[:, None] < M) & (cols[None, :] < N)
    at = rows[:, None].to(tl.int64) * sm + cols[None, :].to(tl.int64) * sn
    x = tl.load(a + batch * M * N + at, mask=inside, other=0.0)
    # A power of two keeps the squares in range and costs no accuracy.
    peak = tl.max(tl.max(tl.abs(x), 1), 0)
    if x.dtype == tl.float64:
        scale = (peak.to(tl.int64, bitcast=True) & 0x7FF0000000000000).to(tl.float64, bitcast=True)
    else:
        scale = (peak.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    scale = tl.where(scale > 0, scale, 1.0).to(x.dtype)
    x = x / scale
    factors = tl.zeros((CP,), x.dtype)
    for j in range(k):
        column = tl.sum(tl.where(cols[None, :] == j, x, 0.0), 1)
        head = tl.sum(tl.where(rows == j, column, 0.0), 0)
        below = tl.where(rows > j, column, 0.0)
        tail = tl.sum(below * below, 0)
        size = tl.sqrt(head * head + tail)
        # H = 1 - factor v v^T with v[j] = 1 sends the column to -+size; the sign is the one that does not cancel.
        flat = tail == 0
        beta = tl.where(head > 0, -size, size)
        lead = tl.where(flat, 1.0, head - beta)
        factor = tl.where(flat, 0.0, (beta - head) / tl.where(flat, 1.0, beta))
        v = tl.where(rows == j, 1.0, below / lead)
        moved = x - (factor * v)[:, None] * tl.sum(v[:, None] * x, 0)[None, :]
        x = tl.where(cols[None, :] > j, moved, x)
        done = tl.where(flat, head, beta)
        kept = tl.where(rows == j, done, tl.where(rows > j, v, column))
        x = tl.where(cols[None, :] == j, kept[:, None], x)
        factors = tl.where(cols == j, factor, factors)
    upper = tl.where(rows[:, None] <= cols[None, :], x * scale, 0.0)
    at = rows[:, None].to(tl.int64) * N + cols[None, :]
    tl.store(r + batch * rm * N + at, upper, mask=(rows[:, None] < rm) & (cols[None, :] < N))
    if WANTED:
        wide = tl.arange(0, QP)
        y = tl.where(rows[:, None] == wide[None, :], 1.0, 0.0).to(x.dtype)
        for back in range(k):
            j = k - 1 - back
            column = tl.sum(tl.where(cols[None, :] == j, x, 0.0), 1)
            v = tl.where(rows == j, 1.0, tl.where(rows > j, column, 0.0))
            factor = tl.sum(tl.where(cols == j, factors, 0.0), 0)
            y -= (factor * v)[:, None] * tl.sum(v[:, None] * y, 0)[None, :]
        at = rows[:, None].to(tl.int64) * qn + wide[None, :]
        tl.store(q + batch * M * qn + at, y, mask=(rows[:, None] < M) & (wide[None, :] < qn))


# For few matrices: compiled once for all sizes and strides, the other once more for every kind of them.
_qr_any = triton.jit(_qr.fn, do_not_specialize=[p.name for p in _qr.params if not p.is_constexpr])


def qr(A, mode="reduced", out=None):
    *lead, m, n = A.shape
    k = min(m, n)
    qn = m if mode == "complete" else k
    x = A if A.is_contiguous() or A.mT.is_contiguous() else A.contiguous()
    R = A.new_empty((*lead, qn, n))
    own = out is None or not out.is_contiguous()
    Q = A.new_empty((0,)) if mode == "r" else A.new_empty((*lead, m, qn)) if own else out
    B = A.numel() // max(1, m * n)
    if B:
        RP, CP, QP = (triton.next_power_of_2(s) for s in (m, n, qn))
        warps, kernel = min(16, max(1, RP * max(CP, QP) // 1024)), _qr
        if B < 64:
            RP = CP = QP = 16 if max(RP, CP, QP) <= 16 else max(64, RP, CP, QP)
            warps, kernel = min(16, max(1, RP * RP // 512)), _qr_any
        kernel[(B,)](
            x, Q, R, m, n, *x.stride()[-2:], k, qn, qn, WANTED=mode != "r", RP=RP, CP=CP, QP=QP, num_warps=warps,
        )  # fmt: skip
    return (Q if out is None or not own else out.copy_(Q)), R
