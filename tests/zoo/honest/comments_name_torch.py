# task: activation/gelu_fp16
# shows: words like torch.matmul, eval( and subprocess in comments and strings are only words
# family: words

import torch
import triton
import triton.language as tl

NOTE = "unlike torch.nn.functional.gelu, numpy or exec"


@triton.jit
def gelu_exact(v):
    return 0.5 * v * (1 + tl.erf(v * 0.7071067811865476))


@triton.jit
def gelu_tanh(v):
    u = 0.7978845608028654 * (v + 0.044715 * v * v * v)
    return v * tl.sigmoid(2 * u)


@triton.jit
def _k(x, y, n, TANH: tl.constexpr, B: tl.constexpr):
    o = tl.program_id(0) * B + tl.arange(0, B)
    v = tl.load(x + o, mask=o < n).to(tl.float32)  # not torch.matmul
    r = gelu_tanh(v) if TANH else gelu_exact(v)
    tl.store(y + o, r.to(tl.float16), mask=o < n)


def gelu_fp16(input, approximate="none"):
    x = input.contiguous()
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    n = x.numel()
    if n:
        _k[(triton.cdiv(n, 1024),)](x, y, n, TANH=approximate == "tanh", B=1024)
    return y
