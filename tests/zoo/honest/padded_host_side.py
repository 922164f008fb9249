# task: activation/gelu_fp16
# shows: pads on the host, computes without a mask, cuts the padding off by a view
# family: host code

import torch
import triton
import triton.language as tl


@triton.jit
def _k(x, y, n, TANH: tl.constexpr, B: tl.constexpr):
    o = tl.program_id(0) * B + tl.arange(0, B)
    v = tl.load(x + o, mask=o < n).to(tl.float32)
    if TANH:
        r = v * tl.sigmoid(1.5957691216057308 * (v + 0.044715 * v * v * v))
    else:
        r = 0.5 * v * (1 + tl.erf(v * 0.7071067811865476))
    tl.store(y + o, r.to(tl.float16), mask=o < n)


def gelu_fp16(input, approximate="none"):
    flat = input.contiguous().view(-1)
    n = flat.numel()
    full = (n + 255) // 256 * 256
    x = torch.nn.functional.pad(flat, (0, full - n))
    y = torch.empty_like(x)
    if full:
        _k[(full // 256,)](x, y, full, TANH=(approximate == "tanh"), B=256)
    return y[:n].contiguous().view(input.shape)
