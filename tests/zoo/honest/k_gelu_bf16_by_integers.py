# task: activation/gelu_bf16
# shows: bf16 seen as int16: widened by a shift, rounded to nearest even by an integer addition
# family: packing

import torch
import triton
import triton.language as tl


@triton.jit
def bits_to_float(h):
    return (h.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def float_to_bits(f):
    u = f.to(tl.uint32, bitcast=True)
    u = u + 0x7FFF + ((u >> 16) & 1)
    return (u >> 16).to(tl.uint16).to(tl.int16, bitcast=True)


@triton.jit
def gelu_bits(x, y, n, TANH: tl.constexpr, BLOCK: tl.constexpr):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    v = bits_to_float(tl.load(x + o, mask=o < n, other=0))
    if TANH:
        r = v * tl.sigmoid(1.5957691216057308 * (v + 0.044715 * v * v * v))
    else:
        r = 0.5 * v * (1.0 + tl.erf(v * 0.7071067811865476))
    tl.store(y + o, float_to_bits(r), mask=o < n)


def gelu_bf16(input, approximate="none"):
    x = input.contiguous().view(torch.int16)
    y = torch.empty_like(x)
    n = x.numel()
    if n:
        gelu_bits[(triton.cdiv(n, 1024),)](x, y, n, TANH=approximate == "tanh", BLOCK=1024)
    return y.view(torch.bfloat16)
