# parts: reduce
"""Standard deviation: the state is count, mean and sum of squared distances to it (Chan)."""

import torch
import triton
import triton.language as tl


@triton.jit
def value(v, w, i, inside, s, t, MODE: tl.constexpr):
    return tl.where(inside, 1.0, 0.0), tl.where(inside, v, 0.0), tl.zeros_like(v)


@triton.jit
def combine(n, mean, squares, m, other, more):
    # The square of rsqrt: cheaper than a division, and as good here.
    root = tl.rsqrt(tl.maximum(n + m, 1.0))
    share = m * root * root
    d = other - mean
    return n + m, mean + d * share, squares + more + d * d * (n * share)


@triton.jit
def finish(state, n, s, t, MODE: tl.constexpr):
    return (tl.sqrt_rn(state[2] / (n - t)),)


def std(input, dim=None, correction=1, keepdim=False, out=None):
    f = torch.float32
    outs = None if out is None else (out,)
    return reduce(input, dim, states=(f, f, f), dtypes=(f,), keepdim=keepdim, outs=outs, t=float(correction))[0]
