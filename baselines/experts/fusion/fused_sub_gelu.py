# parts: strided
import torch
import triton
import triton.language as tl


@triton.jit
def _sub_gelu(a, b, y, rows, sizes, sa, sb, sy, alpha, NUMBER: tl.constexpr, TANH: tl.constexpr, WIDE: tl.constexpr,
              BR: tl.constexpr, BC: tl.constexpr):  # fmt: skip
    r, c, inside = cells(rows, sizes[0], BR, BC, WIDE)
    w = b if NUMBER else tl.load(b + spot(r, c, sizes, sb), mask=inside)
    v = tl.load(a + spot(r, c, sizes, sa), mask=inside) - alpha * w
    if TANH:
        # v / 2 * (1 + tanh(u)) is v * sigmoid(2 u): one exponential and no cancellation.
        g = v * tl.sigmoid(1.5957691216057308 * (v + 0.044715 * v * v * v))
    else:
        g = 0.5 * v * (1.0 + tl.erf(v * 0.7071067811865476))
    tl.store(y + spot(r, c, sizes, sy), g, mask=inside)


def fused_sub_gelu(input, other, alpha=1, approximate="none", out=None):
    """Broadcast operands are walked by their strides, a number is handed to the kernel."""
    number = not isinstance(other, torch.Tensor)
    shape = input.shape if number else torch.broadcast_shapes(input.shape, other.shape)
    a, b = input.expand(shape), float(other) if number else other.expand(shape)
    y = torch.empty(shape, dtype=input.dtype, device=input.device) if out is None else out
    if y.numel():
        sizes, (sa, sb, sy), wide = lay(shape, a.stride(), a.stride() if number else b.stride(), y.stride())
        grid, rows, BR, BC = tiling(sizes)
        _sub_gelu[grid](
            a, b, y, rows, sizes, sa, sb, sy, float(alpha), NUMBER=number, TANH=approximate == "tanh", WIDE=wide, BR=BR,
            BC=BC, num_warps=4,
        )  # fmt: skip
    return y
