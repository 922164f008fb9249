# parts: pointwise
import torch
import triton
import triton.language as tl


@triton.jit
def op(x, y, s, t, MODE: tl.constexpr):
    return x - s * y


def sub(input, other, *, alpha=1, out=None):
    if not torch.is_tensor(other):
        other = torch.full((), other, dtype=input.dtype, device=input.device)
    return pointwise(input, other, out=out, s=float(alpha))
