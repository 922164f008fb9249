# parts: reduce, gelu
"""One pass over the input.

Without an axis two numbers decide: gelu falls up to its stationary point and rises after it, so that its minimum is at
the largest element below or the smallest one above. Along an axis the state is the value and its index.
"""

import torch
import triton
import triton.language as tl


@triton.jit
def value(v, w, i, inside, s, t, MODE: tl.constexpr):
    if MODE >= 2:
        below = v <= s
        infinite = float("inf")
        return tl.where(inside & below, v, -infinite), tl.where(inside & (below == 0), v, infinite)
    else:
        return tl.where(inside, gelu_of(v, MODE), float("inf")), tl.where(inside, i, 2147483647)


@triton.jit
def combine(a, i, b, j):
    if i.dtype == tl.float32:
        return tl.maximum(a, b), tl.minimum(i, j)
    else:
        first = (a < b) | ((a == b) & (i < j))
        return tl.where(first, a, b), tl.where(first, i, j)


@triton.jit
def finish(state, n, s, t, MODE: tl.constexpr):
    if MODE >= 2:
        below, above = state
        infinite = float("inf")
        low = tl.where(below == -infinite, infinite, gelu_of(below, MODE - 2))
        return (tl.minimum(low, tl.where(above == infinite, infinite, gelu_of(above, MODE - 2))),)
    else:
        return state


def fused_gelu_min(input, approximate="none", dim=None, keepdim=False, out=None):
    f, i = torch.float32, torch.int64
    tanh = int(approximate == "tanh")
    if dim is None:
        turn = -0.7524614220710161 if tanh else -0.7517915246935645
        outs = None if out is None else (out,)
        return reduce(input, dim, states=(f, f), dtypes=(f,), outs=outs, s=turn, mode=2 + tanh)[0]
    return reduce(input, dim, states=(f, i), dtypes=(f, i), keepdim=keepdim, outs=out, mode=tanh)
