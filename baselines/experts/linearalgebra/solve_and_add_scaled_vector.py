# parts: eliminate
import torch
import triton
import triton.language as tl


@triton.jit
def _solve_add(t, b, y, x, alpha, n, width, tr, tc, br, bc, yr, yc, LONG: tl.constexpr, S: tl.constexpr,
               W: tl.constexpr):  # fmt: skip
    """W right-hand sides per program: the solution, then another pass that adds alpha * y to it."""
    cols = tl.program_id(0) * W + tl.arange(0, W)
    substitute(t, tr, tc, b, br, bc, x, n, cols, width, False, LONG, S)
    scale = tl.load(alpha)
    for first in range(0, n, S):
        rows = first + tl.arange(0, S)
        at = rows[:, None].to(tl.int64) * width + cols[None, :]
        inside = (rows[:, None] < n) & (cols[None, :] < width)
        total = tl.load(x + at, mask=inside) + scale * tile(y, rows, cols, n, width, yr, yc)
        # A small tile is held by several threads at once: none may store before all have loaded.
        tl.debug_barrier()
        tl.store(x + at, total, mask=inside)


# For small tensors: compiled once for all sizes and strides, the other once more for every kind of them.
_solve_add_any = triton.jit(_solve_add.fn, do_not_specialize=[p.name for p in _solve_add.params if not p.is_constexpr])


def solve_and_add_scaled_vector(A, b, y, alpha):
    x = torch.empty(b.shape, dtype=b.dtype, device=b.device)
    if x.numel():
        n, width = b.shape
        y = y.expand(n, width)
        sizes, kernel = panel(n, width), _solve_add
        if max(A.numel(), b.numel()) < 1 << 17:
            sizes, kernel = panel(64, 16), _solve_add_any
        # A number passed to a kernel would be rounded to fp32.
        alpha = torch.full((), alpha, dtype=b.dtype, device=b.device)
        kernel[(triton.cdiv(width, sizes["W"]),)](
            A, b, y, x, alpha, n, width, *A.stride(), *b.stride(), *y.stride(), **sizes, num_warps=1
        )  # fmt: skip
    return x
