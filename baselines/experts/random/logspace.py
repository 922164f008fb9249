import math

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice


@triton.jit
def _logspace(y, n, first: tl.float64, step: tl.float64, DOUBLE: tl.constexpr, BLOCK: tl.constexpr):
    """y[i] = 2 ** (first + i * step). Unannotated, a Python number would arrive as fp32."""
    o = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    e = first + o.to(tl.float64) * step
    if DOUBLE:
        v = libdevice.exp2(e)
    else:
        # The whole part is a factor that is exact; only the fraction is rounded to fp32.
        whole = tl.floor(e)
        v = tl.exp2((e - whole).to(tl.float32)) * tl.exp2(whole.to(tl.float32))
    tl.store(y + o, v, mask=o < n)


def logspace(start, end, steps, base=10.0, dtype=None, layout=torch.strided, device=None, requires_grad=False):
    place = torch.device("cpu") if device is None else device
    y = torch.empty((steps,), dtype=dtype or torch.float32, device=place)
    if steps:
        scale = math.log2(base)
        pace = (end - start) / (steps - 1) * scale if steps > 1 else 0.0
        double = y.dtype == torch.float64
        _logspace[(triton.cdiv(steps, 1024),)](y, steps, start * scale, pace, DOUBLE=double, BLOCK=1024, num_warps=8)
    return y.requires_grad_() if requires_grad else y
