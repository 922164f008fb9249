import torch
import triton
import triton.language as tl


@triton.jit
def _shift(x, y, n, sizes, strides, turns, ROLLED: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr):
    """y in row-major order; the innermost axis comes first. ROLLED has a bit for each axis that is shifted."""
    first = tl.program_id(0).to(tl.int64) * BLOCK if WIDE else tl.program_id(0) * BLOCK
    o = first + tl.arange(0, BLOCK)
    e = o
    at = o * 0
    for k in tl.static_range(len(sizes)):
        if k + 1 < len(sizes):
            i = e % sizes[k]
            e = e // sizes[k]
        else:
            i = e
        if (ROLLED >> k) & 1:
            i += turns[k]
            i = tl.where(i >= sizes[k], i - sizes[k], i)
        at += i * strides[k]
    tl.store(y + o, tl.load(x + at, mask=o < n), mask=o < n)


def ifftshift(input, dim=None):
    """A gather: every element of the result finds its place in the input by its strides."""
    x, rank = input, input.dim()
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    dims = range(rank) if dim is None else (dim,) if isinstance(dim, int) else dim
    shifted = {d % rank for d in dims}
    axes = []  # (size, stride, turn), the innermost first; neighbours that stay as they are become one
    for d in reversed(range(rank)):
        size, stride, turn = x.shape[d], x.stride(d), x.shape[d] // 2 if d in shifted else 0
        if size == 1:
            continue
        if axes and not turn and not axes[-1][2] and stride == axes[-1][0] * axes[-1][1]:
            axes[-1] = (axes[-1][0] * size, axes[-1][1], 0)
        else:
            axes.append((size, stride, turn))
    sizes, strides, turns = zip(*(axes or [(1, 1, 0)]), strict=True)
    n = y.numel()
    if n:
        reach = sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
        _shift[(triton.cdiv(n, 1024),)](
            x, y, n, sizes, strides, turns, ROLLED=sum(1 << k for k, turn in enumerate(turns) if turn),
            WIDE=max(n, reach) >= 2**31 - 2**16, BLOCK=1024, num_warps=4,
        )  # fmt: skip
    return y
