# parts: reduce
"""Sum over any axes."""

import torch
import triton
import triton.language as tl


@triton.jit
def value(v, w, i, inside, s, t, MODE: tl.constexpr):
    kind: tl.constexpr = tl.int64 if MODE == 1 else tl.float64 if MODE == 2 else tl.float32
    return (tl.where(inside, v, 0).to(kind),)


@triton.jit
def combine(a, b):
    return a + b


@triton.jit
def finish(state, n, s, t, MODE: tl.constexpr):
    return state


def sum(input, dim, keepdim=False, dtype=None):
    if dtype is None:
        dtype = input.dtype if input.dtype.is_floating_point else torch.int64
    mode = {torch.int64: 1, torch.float64: 2}.get(dtype, 0)
    return reduce(input, dim, states=(dtype,), dtypes=(dtype,), keepdim=keepdim, mode=mode)[0]
