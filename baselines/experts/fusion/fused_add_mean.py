# parts: reduce
"""The sum never leaves the registers: each input is read once, and added up in one or (few results) two launches."""

import torch
import triton
import triton.language as tl


@triton.jit
def value(v, w, i, inside, s, t, MODE: tl.constexpr):
    if MODE >= 2:
        # A number reaches a kernel as fp32: s + t is it to 48 bits.
        v, w, s = v.to(tl.float64), w.to(tl.float64), s.to(tl.float64) + t
    if MODE % 2:
        v += s
    else:
        v += s * w
    return (tl.where(inside, v, 0.0),)


@triton.jit
def combine(a, b):
    return a + b


@triton.jit
def finish(state, n, s, t, MODE: tl.constexpr):
    return (state[0] / n,)


def fused_add_mean(input, other, dim=None, alpha=1, keepdim=False, dtype=None, out=None):
    dtype = dtype or input.dtype
    x, w, s = input, None, float(alpha)
    if isinstance(other, torch.Tensor):
        x, w = torch.broadcast_tensors(input, other)
        if w.shape != other.shape or x.shape != input.shape:
            x, w = x.contiguous(), w.contiguous()
    else:
        s *= float(other)
    high = s * 536870913.0
    high -= high - s  # the leading 24 bits (Veltkamp)
    mode = int(w is None) + 2 * int(dtype == torch.float64)
    outs = None if out is None else (out,)
    return reduce(x, dim, states=(dtype,), dtypes=(dtype,), w=w, keepdim=keepdim, outs=outs, s=high, t=s - high,
                  mode=mode)[0]  # fmt: skip
