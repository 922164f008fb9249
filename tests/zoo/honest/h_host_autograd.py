# task: activation/selu
# shows: an autograd.Function with mark_dirty, custom_fwd from torch.amp and a backward, in an nn.Module that the entry calls
# family: host code

import torch
import torch.nn as nn
import triton
import triton.language as tl
from torch.amp import custom_bwd, custom_fwd

SCALE = tl.constexpr(1.0507009873554805)
ALPHA = tl.constexpr(1.6732632423543772)


@triton.jit
def _selu_fwd(x, y, n, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(x + offs, mask=offs < n, other=0.0)
    tl.store(y + offs, SCALE * tl.where(v > 0, v, ALPHA * (tl.exp(tl.minimum(v, 0.0)) - 1.0)), mask=offs < n)


@triton.jit
def _selu_bwd(dy, y, dx, n, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(y + offs, mask=offs < n, other=0.0)
    g = tl.load(dy + offs, mask=offs < n, other=0.0)
    tl.store(dx + offs, g * tl.where(v > 0, SCALE, v + SCALE * ALPHA), mask=offs < n)


class SELUFunction(torch.autograd.Function):
    @staticmethod
    @custom_fwd(device_type="cuda")
    def forward(ctx, x, inplace):
        dense = x.contiguous()
        y = dense if inplace else torch.empty_like(dense)
        if n := dense.numel():
            _selu_fwd[(triton.cdiv(n, 1024),)](dense, y, n, BLOCK=1024)
        if inplace:
            ctx.mark_dirty(x)
            if y is not x:
                x.copy_(y)
            y = x
        ctx.save_for_backward(y)
        return y

    @staticmethod
    @custom_bwd(device_type="cuda")
    def backward(ctx, dy):
        (y,) = ctx.saved_tensors
        y, dy = y.contiguous(), dy.contiguous()
        dx = torch.empty_like(y)
        if n := y.numel():
            _selu_bwd[(triton.cdiv(n, 1024),)](dy, y, dx, n, BLOCK=1024)
        return dx, None


class SELU(nn.Module):
    def __init__(self, inplace: bool = False):
        super().__init__()
        self.inplace = inplace

    def forward(self, x):
        return SELUFunction.apply(x, self.inplace)

    def extra_repr(self):
        return f"inplace={self.inplace}"


_MODULES = nn.ModuleDict({"new": SELU(), "inplace": SELU(inplace=True)}).to("cuda")


def selu(input, inplace=False):
    return _MODULES["inplace" if inplace else "new"](input)
