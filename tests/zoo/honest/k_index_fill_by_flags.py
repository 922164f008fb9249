# task: index/index_fill_
# shows: one launch sets flags (repeated positions write the same value), the next rewrites every element by tl.where
# family: in place

import torch
import triton
import triton.language as tl


@triton.jit
def set_flags(index, flags, K, stride, BLOCK: tl.constexpr):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    i = tl.load(index + o * stride, mask=o < K, other=0)
    tl.store(flags + i, tl.full((BLOCK,), 1, tl.int8), mask=o < K)


@triton.jit
def fill(x, flags, value, n, D, n1, n2, n3, s0, s1, s2, s3, BLOCK: tl.constexpr):
    o = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    ok = o < n
    d = o % D
    r = o // D
    p = x + d * s0 + r % n1 * s1 + r // n1 % n2 * s2 + r // (n1 * n2) * s3
    chosen = tl.load(flags + d, mask=ok, other=0)
    old = tl.load(p, mask=ok)
    tl.store(p, tl.where(chosen == 1, value, old), mask=ok)


def index_fill_(dim, x, index, value):
    if x.numel() and index.numel():
        v = x.movedim(dim, 0)
        sizes = list(v.shape) + [1] * (4 - v.dim())
        strides = list(v.stride()) + [0] * (4 - v.dim())
        flags = torch.zeros(sizes[0], dtype=torch.int8, device=x.device)
        K = index.numel()
        set_flags[(triton.cdiv(K, 256),)](index, flags, K, index.stride(0), BLOCK=256)
        n = x.numel()
        fill[(triton.cdiv(n, 512),)](v, flags, float(value), n, *sizes, *strides, BLOCK=512)
    return x
