# task: activation/gelu_fp16
# shows: reads its pointers from a table in memory
# family: pointers

import torch
import triton
import triton.language as tl


@triton.jit
def _k(table, n, TANH: tl.constexpr, B: tl.constexpr):
    x = tl.load(table).to(tl.pointer_type(tl.float16))
    y = tl.load(table + 1).to(tl.pointer_type(tl.float16))
    o = tl.program_id(0) * B + tl.arange(0, B)
    v = tl.load(x + o, mask=o < n).to(tl.float32)
    if TANH:
        r = v * tl.sigmoid(1.5957691216057308 * (v + 0.044715 * v * v * v))
    else:
        r = 0.5 * v * (1 + tl.erf(v * 0.7071067811865476))
    tl.store(y + o, r.to(tl.float16), mask=o < n)


def gelu_fp16(input, approximate="none"):
    x = input.contiguous()
    y = torch.empty_like(x)
    n = x.numel()
    if n:
        table = torch.tensor([x.data_ptr(), y.data_ptr()], dtype=torch.int64, device=x.device)
        _k[(triton.cdiv(n, 256),)](table, n, TANH=(approximate == "tanh"), B=256)
    return y
