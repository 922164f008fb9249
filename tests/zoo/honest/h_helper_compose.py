# task: fusion/fused_log_tanh
# shows: jit helpers composed by a factory (closures over jit functions), one kernel per operation made by a loop, and a jit function as a constexpr argument
# family: helpers

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice


@triton.jit
def _log(v):
    return libdevice.log(v)


@triton.jit
def _tanh(v):
    return libdevice.tanh(v)


def compose(first, then):
    @triton.jit
    def both(v):
        return then(first(v))

    return both


def elementwise(op, block):
    width: tl.constexpr = tl.constexpr(block)

    @triton.jit
    def kernel(x_ptr, y_ptr, n, AFTER: tl.constexpr):
        offs = tl.program_id(0) * width + tl.arange(0, width)
        mask = offs < n
        v = op(tl.load(x_ptr + offs, mask=mask, other=1.0))
        if AFTER is not None:
            v = AFTER(v)
        tl.store(y_ptr + offs, v, mask=mask)

    return kernel


OPS = {"log": _log, "log_tanh": compose(_log, _tanh)}
KERNELS = {(name, block): elementwise(op, block) for name, op in OPS.items() for block in (128, 1024)}


def fused_log_tanh(input, out=None):
    x = input.contiguous()
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    n = x.numel()
    if n >= 4096:
        KERNELS["log_tanh", 1024][(triton.cdiv(n, 1024),)](x, y, n, AFTER=None)
    elif n:
        KERNELS["log", 128][(triton.cdiv(n, 128),)](x, y, n, AFTER=_tanh)
    if out is None:
        return y
    out.copy_(y)
    return out
