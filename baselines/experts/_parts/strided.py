import triton
import triton.language as tl

# A result of any shape is walked as a matrix: its columns are the innermost axis (after merging neighbouring axes that
# every tensor allows to merge), its rows all the others. Only the rows need divisions, and there are few of them.


@triton.jit
def place(e, sizes, strides, first: tl.constexpr):
    """Where element e of a row-major walk over the axes from ``first`` on (innermost first) lies in a tensor."""
    at = e * 0
    for k in tl.static_range(first, len(sizes)):
        if k + 1 < len(sizes):
            at += e % sizes[k] * strides[k]
            e = e // sizes[k]
        else:
            at += e * strides[k]
    return at


@triton.jit
def spot(r, c, sizes, strides):
    """Where the elements in rows r and columns c lie in a tensor of these strides."""
    return place(r, sizes, strides, 1) + c * strides[0]


@triton.jit
def cells(rows, columns, BR: tl.constexpr, BC: tl.constexpr, WIDE: tl.constexpr, DOWN: tl.constexpr = False):
    """Rows, columns and mask of this program's tile. DOWN: neighbouring programs share columns, not rows."""
    if DOWN:
        height = tl.cdiv(rows, BR)
        top, left = tl.program_id(0) % height, tl.program_id(0) // height
    else:
        width = tl.cdiv(columns, BC)
        top, left = tl.program_id(0) // width, tl.program_id(0) % width
    if WIDE:
        top, left = top.to(tl.int64), left.to(tl.int64)
    r = (top * BR + tl.arange(0, BR))[:, None]
    c = (left * BC + tl.arange(0, BC))[None, :]
    return r, c, (r < rows) & (c < columns)


def lay(shape, *strides):
    """(sizes, strides of each tensor, wide), innermost axis first; wide where 32 bits do not hold every offset."""
    axes = []
    for d in reversed(range(len(shape))):
        steps = [s[d] for s in strides]
        if shape[d] == 1:
            continue
        if axes and all(now == axes[-1][0] * inner for now, inner in zip(steps, axes[-1][1], strict=True)):
            axes[-1] = (axes[-1][0] * shape[d], axes[-1][1])
        else:
            axes.append((shape[d], steps))
    axes = axes or [(1, [0] * len(strides))]
    reach = [sum((size - 1) * abs(steps[k]) for size, steps in axes) for k in range(len(strides))]
    n = 1
    for size, _ in axes:
        n *= size
    return (
        tuple(size for size, _ in axes),
        [tuple(steps[k] for _, steps in axes) for k in range(len(strides))],
        max([n, *reach]) >= 2**31 - 2**16,
    )


def tiling(sizes, block=1024, width=1024):
    """(grid, rows, BR, BC): tiles of block elements, at most width columns."""
    rows = 1
    for size in sizes[1:]:
        rows *= size
    BC = min(width, triton.next_power_of_2(sizes[0]))
    BR = min(block // BC, triton.next_power_of_2(rows))
    return (triton.cdiv(rows, BR) * triton.cdiv(sizes[0], BC),), rows, BR, BC
