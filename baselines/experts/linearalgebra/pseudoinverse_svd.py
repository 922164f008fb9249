# parts: jacobi
import torch
import triton
import triton.language as tl


@triton.jit(do_not_specialize=["R", "C", "ar", "ac"])
def _pinv(a, out, flag, spare, R, C, ar, ac, rcond, RP: tl.constexpr, CP: tl.constexpr, SQUARE: tl.constexpr):
    """One matrix per program: T S^-2 U^T with T = A^T U = V S, over the singular values above the cut-off."""
    batch = tl.program_id(0).to(tl.int64)
    rows = tl.arange(0, RP)
    cols = tl.arange(0, CP)
    spare += batch * (2 * RP * RP)
    if SQUARE:
        ac = 1
    x, scale = tall(a + batch * R * C, rows, cols, R, C, ar, ac)
    w, square = orthogonalise(x, cols, flag + batch, CP if SQUARE else rounds(C), RP, CP)
    s = tl.sqrt(square)
    kept = s > rcond * tl.max(s, 0)
    u = tl.where(kept[:, None], directions(w, square), 0.0)
    # A is read again rather than kept in registers through all the rotations.
    x, scale = tall(a + batch * R * C, rows, cols, R, C, ar, ac)
    t = dot(x, tl.trans(u), spare)
    # The rounding of many rotations has left u and t not quite orthogonal; (I + e)^-1 = I - e takes that out.
    inverse = tl.where(kept, 1.0 / tl.where(kept, tl.sum(t * t, 0), 1.0), 0.0)
    eye = cols[:, None] == cols[None, :]
    middle = (
        tl.where(eye, 2.0 * inverse[None, :], 0.0) - inverse[:, None] * dot(tl.trans(t), t, spare) * inverse[None, :]
    )
    y = dot(t, dot(middle, 2.0 * u - dot(dot(u, tl.trans(u), spare), u, spare), spare), spare)
    # The pseudoinverse of a tall (R, C) matrix is (C, R); that of a wide one is its transpose, in either case A's
    # strides with the axes exchanged.
    where = cols[:, None].to(tl.int64) * (R if ac == 1 else 1) + rows[None, :].to(tl.int64) * (1 if ac == 1 else C)
    tl.store(out + batch * R * C + where, y / scale, mask=(cols[:, None] < C) & (rows[None, :] < R))


def pseudoinverse_svd(A, full_matrices=True, rcond=1e-15, out=None):
    x = A.contiguous()
    y = x.new_empty(x.mT.shape) if out is None or not out.is_contiguous() else out
    B, R, C, ar, ac, RP, CP, square, warps, spare = sides(x)
    if x.numel():
        flag = torch.empty(B, dtype=torch.int32, device=A.device)
        _pinv[(B,)](x, y, flag, spare, R, C, ar, ac, rcond, RP=RP, CP=CP, SQUARE=square, num_warps=warps)
    return y if out is None or y is out else out.copy_(y)
