# task: activation/gelu_fp16
# shows: a persistent kernel: few programs, each loops over many blocks with a while loop
# family: persistent kernels

import torch
import triton
import triton.language as tl


@triton.jit
def _k(x, y, n, TANH: tl.constexpr, B: tl.constexpr):
    start = tl.program_id(0) * B
    while start < n:
        o = start + tl.arange(0, B)
        v = tl.load(x + o, mask=o < n).to(tl.float32)
        if TANH:
            r = v * tl.sigmoid(1.5957691216057308 * (v + 0.044715 * v * v * v))
        else:
            r = 0.5 * v * (1 + tl.erf(v * 0.7071067811865476))
        tl.store(y + o, r.to(tl.float16), mask=o < n)
        start += tl.num_programs(0) * B


def gelu_fp16(input, approximate="none"):
    x = input if input.is_contiguous() else input.contiguous()
    y = torch.empty_like(x)
    if x.numel() == 0:
        return y
    _k[(8,)](x, y, x.numel(), TANH=(approximate == "tanh"), B=512)
    return y
