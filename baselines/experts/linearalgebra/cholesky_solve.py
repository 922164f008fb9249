# parts: eliminate
import triton
import triton.language as tl


@triton.jit
def _both(t, b, y, n, width, tb, tr, tc, bb, br, bc, LONG: tl.constexpr, S: tl.constexpr, W: tl.constexpr):
    """One matrix and W right-hand sides per program: down with L, up with its transpose."""
    batch = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * W + tl.arange(0, W)
    t += batch * tb
    y += batch * n * width
    substitute(t, tr, tc, b + batch * bb, br, bc, y, n, cols, width, True, LONG, S)
    substitute(t, tc, tr, y, width, 1, y, n, cols, width, False, LONG, S)


# For few matrices: compiled once for all sizes and strides, the other once more for every kind of them.
_both_any = triton.jit(_both.fn, do_not_specialize=[p.name for p in _both.params if not p.is_constexpr])


def cholesky_solve(B, L, upper=False, out=None):
    y = target(out, B, B.shape)
    if y.numel():
        t, *st = stacked(L.mT if upper else L)
        b, *sb = stacked(B)
        n, width = B.shape[-2:]
        sizes, kernel = panel(n, width), _both
        if b.shape[0] < 64:
            sizes, kernel = panel(64, 16), _both_any
        kernel[(b.shape[0], triton.cdiv(width, sizes["W"]))](t, b, y, n, width, *st, *sb, **sizes, num_warps=1)
    return handed(y, out)
