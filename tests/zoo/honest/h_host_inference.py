# task: index/permute_copy
# shows: the entry runs under torch.inference_mode(), shapes and strides padded by an lru_cache'd plan
# family: host code

import functools

import torch
import triton
import triton.language as tl


@functools.lru_cache(maxsize=256)
def _plan(shape: tuple, stride: tuple, dims: tuple):
    assert sorted(d % len(shape) for d in dims) == list(range(len(shape))), f"{dims=} is no permutation"
    size, step = [shape[d] for d in dims], [stride[d] for d in dims]
    lead = 5 - len(dims)
    return tuple(size), [1] * lead + size, [0] * lead + step


@triton.jit
def _gather(x, y, total, n1, n2, n3, n4, s0, s1, s2, s3, s4, B: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    mask = i < total
    rest = i // n4
    at = (i - rest * n4) * s4
    left = rest // n3
    at += (rest - left * n3) * s3
    rest = left // n2
    at += (left - rest * n2) * s2
    left = rest // n1
    at += (rest - left * n1) * s1 + left * s0
    tl.store(y + i, tl.load(x + at, mask=mask), mask=mask)


@torch.inference_mode()
def permute_copy(input, dims):
    size, (_, n1, n2, n3, n4), steps = _plan(tuple(input.shape), input.stride(), tuple(dims))
    y = torch.empty(size, dtype=input.dtype, device=input.device)
    if total := y.numel():
        _gather[(triton.cdiv(total, 512),)](input, y, total, n1, n2, n3, n4, *steps, B=512)
    return y
