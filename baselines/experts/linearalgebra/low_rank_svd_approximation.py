# parts: jacobi
import torch
import triton
import triton.language as tl


@triton.jit(do_not_specialize=["R", "C", "k", "ar", "ac"])
def _low_rank(a, out, flag, spare, R, C, k, ar, ac, RP: tl.constexpr, CP: tl.constexpr, SQUARE: tl.constexpr):
    """One matrix per program: A_k = U_k U_k^T A with the left vectors of the k largest singular values."""
    batch = tl.program_id(0).to(tl.int64)
    rows = tl.arange(0, RP)
    cols = tl.arange(0, CP)
    spare += batch * (2 * RP * RP)
    if SQUARE:
        ac = 1
    x, scale = tall(a + batch * R * C, rows, cols, R, C, ar, ac)
    w, square = orthogonalise(x, cols, flag + batch, CP if SQUARE else rounds(C), RP, CP)
    larger = (square[None, :] > square[:, None]) | (
        (square[None, :] == square[:, None]) & (cols[None, :] < cols[:, None])
    )
    kept = tl.sum(larger.to(tl.int32), 1) < k
    u = tl.where(kept[:, None], directions(w, square), 0.0)
    # A is read again rather than kept in registers through all the rotations.
    x, scale = tall(a + batch * R * C, rows, cols, R, C, ar, ac)
    y = dot(dot(x, tl.trans(u), spare), u, spare)
    where = cols[:, None].to(tl.int64) * ac + rows[None, :].to(tl.int64) * ar
    tl.store(out + batch * R * C + where, y * scale, mask=(cols[:, None] < C) & (rows[None, :] < R))


def low_rank_svd_approximation(A, k, *, full_matrices=True, out=None):
    x = A.contiguous()
    y = torch.empty_like(x) if out is None or not out.is_contiguous() else out
    B, R, C, ar, ac, RP, CP, square, warps, spare = sides(x)
    if x.numel():
        flag = torch.empty(B, dtype=torch.int32, device=A.device)
        _low_rank[(B,)](x, y, flag, spare, R, C, k, ar, ac, RP=RP, CP=CP, SQUARE=square, num_warps=warps)
    return y if out is None or y is out else out.copy_(y)
