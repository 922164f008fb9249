# parts: jacobi
import torch
import triton
import triton.language as tl


@triton.jit(do_not_specialize=["R", "C", "ar", "ac"])
def _reconstruct(
    a, out, s, squares, flag, spare, R, C, ar, ac, RP: tl.constexpr, CP: tl.constexpr, SQUARE: tl.constexpr
):
    """One matrix per program: U (U^T A), where U^T A = diag(S) Vh, and S in descending order."""
    batch = tl.program_id(0).to(tl.int64)
    rows = tl.arange(0, RP)
    cols = tl.arange(0, CP)
    spare += batch * (2 * RP * RP)
    if SQUARE:
        ac = 1
    x, scale = tall(a + batch * R * C, rows, cols, R, C, ar, ac)
    w, square = orthogonalise(x, cols, flag + batch, CP if SQUARE else rounds(C), RP, CP)
    # Padding goes last. All threads rank the same bits, read from one place: no rank may be given twice.
    squares += batch * CP
    tl.store(squares + cols, tl.where(cols < C, square, -1.0))
    tl.debug_barrier()
    mine = tl.load(squares + cols)[:, None]
    other = tl.load(squares + cols)[None, :]
    before = (other > mine) | ((other == mine) & (cols[None, :] < cols[:, None]))
    tl.store(s + batch * C + tl.sum(before.to(tl.int32), 1), tl.sqrt(square) * scale, mask=cols < C)
    u = directions(w, square)
    # A is read again rather than kept in registers through all the rotations.
    x, scale = tall(a + batch * R * C, rows, cols, R, C, ar, ac)
    y = dot(dot(x, tl.trans(u), spare), u, spare)
    where = cols[:, None].to(tl.int64) * ac + rows[None, :].to(tl.int64) * ar
    tl.store(out + batch * R * C + where, y * scale, mask=(cols[:, None] < C) & (rows[None, :] < R))


def fused_svd_reconstruct(A):
    x = A.contiguous()
    y = torch.empty_like(x)
    B, R, C, ar, ac, RP, CP, square, warps, spare = sides(x)
    S = x.new_empty((*x.shape[:-2], C))
    if x.numel():
        flag = torch.empty(B, dtype=torch.int32, device=A.device)
        squares = x.new_empty((B, CP))
        _reconstruct[(B,)](x, y, S, squares, flag, spare, R, C, ar, ac, RP=RP, CP=CP, SQUARE=square, num_warps=warps)
    return y, S
