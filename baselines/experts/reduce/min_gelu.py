# parts: reduce
"""Minimum of GELU in one pass; along an axis the state also holds the index."""

import torch
import triton
import triton.language as tl


@triton.jit
def value(v, w, i, inside, s, t, MODE: tl.constexpr):
    if MODE % 2:
        # v / 2 * (1 + tanh(u)) is v * sigmoid(2 u): one exponential and no cancellation
        y = v * tl.sigmoid(1.5957691216057308 * (v + 0.044715 * v * v * v))
    else:
        y = 0.5 * v * (1.0 + tl.erf(v * 0.7071067811865476))
    return tl.where(inside, y, float("inf")), tl.where(inside, i, 2147483647)


@triton.jit
def combine(a, i, b, j):
    first = (a < b) | ((a == b) & (i < j))
    return tl.where(first, a, b), tl.where(first, i, j)


@triton.jit
def finish(state, n, s, t, MODE: tl.constexpr):
    return state


def min_gelu(input, dim=None, keepdim=False, approximate="none", out=None):
    kinds = (torch.float32, torch.int64)
    mode = int(approximate == "tanh")
    outs = None
    if dim is None and out is not None:
        outs = (out, torch.empty((), dtype=torch.int64, device=input.device))
    values, indices = reduce(input, dim, states=kinds, dtypes=kinds, keepdim=keepdim and dim is not None, outs=outs,
                             mode=mode)  # fmt: skip
    return values if dim is None else (values, indices)
