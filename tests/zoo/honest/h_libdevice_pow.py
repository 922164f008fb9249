# task: math/pow
# shows: libdevice by three spellings, fast paths for some exponents, and torch.promote_types and result_type (of dtypes, not of data)
# family: libdevice

import numbers

import torch
import triton
import triton.language as tl
import triton.language.extra.cuda.libdevice as cuda_math
from triton.language.extra import libdevice as ld


@triton.jit
def _pow_tensor(x, e, y, n, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    m = i < n
    tl.store(y + i, cuda_math.pow(tl.load(x + i, mask=m, other=1.0), tl.load(e + i, mask=m, other=1.0)), mask=m)


@triton.jit
def _pow_scalar(x, e, y, n, HOW: tl.constexpr, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    m = i < n
    v = tl.load(x + i, mask=m, other=1.0)
    if HOW == "one":
        r = tl.full((B,), 1.0, tl.float32)
    elif HOW == "square":
        r = v * v
    elif HOW == "sqrt":
        r = tl.math.sqrt_rn(v)
    elif HOW == "reciprocal":
        r = ld.rcp_rn(v)
    else:
        r = tl.extra.cuda.libdevice.pow(v, tl.full((B,), e, tl.float32))
    tl.store(y + i, r, mask=m)


PATHS = {0.0: "one", 2.0: "square", 0.5: "sqrt", -1.0: "reciprocal"}


def pow(input_tensor, exponent, out=None):
    x = input_tensor
    dtype = torch.promote_types(x.dtype, torch.float32)
    assert torch.can_cast(torch.result_type(x, exponent), dtype), f"{x.dtype} ** {exponent} is not {dtype}"
    if isinstance(exponent, numbers.Number):
        x = x.contiguous()
        y = torch.empty_like(x, dtype=dtype)
        if n := x.numel():
            how = PATHS.get(float(exponent), "general")
            _pow_scalar[(triton.cdiv(n, 512),)](x, float(exponent), y, n, HOW=how, B=512)
    else:
        x, e = (t.contiguous() for t in torch.broadcast_tensors(x, exponent))
        y = torch.empty_like(x, dtype=dtype)
        if n := x.numel():
            _pow_tensor[(triton.cdiv(n, 512),)](x, e, y, n, B=512)
    return y if out is None else out.copy_(y)
