# parts: strided
import torch
import triton
import triton.language as tl


@triton.jit
def _mul_sub(a, b, c, y, rows, sizes, sa, sb, sc, sy, alpha, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr,
             WIDE: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr):  # fmt: skip
    """A, B and C say which of the three operands are tensors; the others are numbers."""
    i, j, inside = cells(rows, sizes[0], BR, BC, WIDE)
    u = tl.load(a + spot(i, j, sizes, sa), mask=inside) if A else a
    v = tl.load(b + spot(i, j, sizes, sb), mask=inside) if B else b
    w = tl.load(c + spot(i, j, sizes, sc), mask=inside) if C else c
    tl.store(y + spot(i, j, sizes, sy), u * v - alpha * w, mask=inside)


def fused_mul_sub(input, other_mul, other_sub, alpha=1, out=None):
    """Broadcast operands are walked by their strides, numbers are handed to the kernel."""
    given = (input, other_mul, other_sub)
    tensors = [x for x in given if isinstance(x, torch.Tensor)]
    A, B, C = (isinstance(x, torch.Tensor) for x in given)
    shape = torch.broadcast_shapes(*[x.shape for x in tensors])
    y = torch.empty(shape, dtype=tensors[0].dtype, device=tensors[0].device) if out is None else out
    if y.numel():
        xs = [x.expand(shape) if isinstance(x, torch.Tensor) else float(x) for x in given]
        # A number has no strides; those of the result stand in, so that they hinder no merging of axes.
        steps = [x.stride() if isinstance(x, torch.Tensor) else y.stride() for x in xs]
        sizes, steps, wide = lay(shape, *steps, y.stride())
        grid, rows, BR, BC = tiling(sizes)
        _mul_sub[grid](
            *xs, y, rows, sizes, *steps, float(alpha), A=A, B=B, C=C, WIDE=wide, BR=BR, BC=BC, num_warps=4
        )  # fmt: skip
    return y
