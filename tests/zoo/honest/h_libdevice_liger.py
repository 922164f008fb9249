# task: math/sqrt_tanh
# shows: as Liger does: libdevice from the new place, or else the old one; the choice depends on the versions of triton and torch
# family: libdevice

import operator
from functools import partial

import torch
import triton
import triton.language as tl


def _at_least(module, *wanted, compare=operator.ge):
    return compare(tuple(int(p) for p in module.__version__.split("+")[0].split(".")[:2]), wanted)


if _at_least(triton, 3, 0):
    try:
        # typical import path with dispatch available
        from triton.language.extra.libdevice import tanh
    except ModuleNotFoundError:
        # for working with NGC containers
        from triton.language.extra.cuda.libdevice import tanh
else:
    from triton.language.math import tanh

is_nvidia = partial(operator.is_, torch.version.hip, None)
assert is_nvidia() and torch.version.cuda is not None, "written for CUDA"


@triton.jit
def _fwd(x_ptr, y_ptr, n_elements, BLOCK_SIZE: tl.constexpr):
    program_id = tl.program_id(0).to(tl.int64)
    offsets = program_id * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    mask = offsets < n_elements
    x = tl.load(x_ptr + offsets, mask=mask, other=0)
    tl.store(y_ptr + offsets, tanh(tl.sqrt(x)), mask=mask)


def sqrt_tanh(input, out=None):
    x = input.contiguous()
    y = torch.empty_like(x)
    n = x.numel()
    if n > 0:
        _fwd[(triton.cdiv(n, 1024),)](x, y, n, BLOCK_SIZE=1024, num_warps=4)
    return y if out is None else out.copy_(y)
