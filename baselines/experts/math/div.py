# parts: pointwise
import torch
import triton
import triton.language as tl


@triton.jit
def op(x, y, s, t, MODE: tl.constexpr):
    # The plain / may be two steps off: 693 / 7 must not become 98.99999.
    q = tl.div_rn(x, y)
    if MODE == 1:
        q = tl.floor(q)
    if MODE == 2:
        q = tl.where(q < 0, tl.ceil(q), tl.floor(q))
    return q


def div(input, other, rounding_mode=None, out=None):
    if not torch.is_tensor(other):
        other = torch.full((), other, dtype=input.dtype, device=input.device)
    return pointwise(input, other, out=out, mode=(None, "floor", "trunc").index(rounding_mode))
