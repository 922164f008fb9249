# parts: reduce
"""Index of the maximum: the state is the value and its index."""

import torch
import triton
import triton.language as tl


@triton.jit
def value(v, w, i, inside, s, t, MODE: tl.constexpr):
    # No element is worse than the neutral one: where all are infinite, the lower index decides.
    lowest = -9223372036854775808 if MODE == 1 else float("-inf")
    return tl.where(inside, v, lowest), tl.where(inside, i, 2147483647)


@triton.jit
def combine(a, i, b, j):
    a_nan, b_nan = a != a, b != b
    first = ((a > b) & (b_nan == 0)) | (a_nan & (b_nan == 0)) | (((a == b) | (a_nan & b_nan)) & (i < j))
    return tl.where(first, a, b), tl.where(first, i, j)


@triton.jit
def finish(state, n, s, t, MODE: tl.constexpr):
    return (state[1],)


def argmax(input_tensor, dim, keepdim=False):
    states = (input_tensor.dtype, torch.int64)
    mode = int(input_tensor.dtype == torch.int64)
    return reduce(input_tensor, dim, states=states, dtypes=(torch.int64,), keepdim=keepdim, mode=mode)[0]
