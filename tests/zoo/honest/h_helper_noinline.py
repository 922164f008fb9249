# task: math/logit
# shows: a helper with noinline=True: the work on one tile is a real function that is called, not inlined
# family: helpers

import torch
import triton
import triton.language as tl


@triton.jit
def _clamped(v, lo, hi):
    return tl.minimum(tl.maximum(v, lo), hi)


@triton.jit(noinline=True)
def _tile(src, dst, start, n, lo, hi, CLAMP: tl.constexpr, BLOCK: tl.constexpr):
    offs = start + tl.arange(0, BLOCK)
    v = tl.load(src + offs, mask=offs < n, other=0.5)
    if CLAMP:
        v = _clamped(v, lo, hi)
    tl.store(dst + offs, tl.log(v / (1.0 - v)), mask=offs < n)


@triton.jit
def _logit_kernel(src, dst, n, lo, hi, CLAMP: tl.constexpr, BLOCK: tl.constexpr, TILES: tl.constexpr):
    base = tl.program_id(0) * (BLOCK * TILES)
    for t in range(TILES):
        _tile(src, dst, base + t * BLOCK, n, lo, hi, CLAMP, BLOCK)


def logit(input, eps=None, out=None):
    x = input.contiguous()
    y = torch.empty_like(x) if out is None or not out.is_contiguous() else out
    n = x.numel()
    if n:
        lo = 0.0 if eps is None else float(eps)
        _logit_kernel[(triton.cdiv(n, 2048),)](x, y, n, lo, 1.0 - lo, CLAMP=eps is not None, BLOCK=512, TILES=4)
    if out is None:
        return y
    return out if out is y else out.copy_(y)
