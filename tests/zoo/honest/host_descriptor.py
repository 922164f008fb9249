# task: activation/gelu_fp16
# shows: tensor descriptors made by the host
# family: tensor descriptors

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor


@triton.jit
def _k(x, y, n, TANH: tl.constexpr, B: tl.constexpr):
    o = tl.program_id(0) * B
    v = x.load([o]).to(tl.float32)
    if TANH:
        r = v * tl.sigmoid(1.5957691216057308 * (v + 0.044715 * v * v * v))
    else:
        r = 0.5 * v * (1 + tl.erf(v * 0.7071067811865476))
    y.store([o], r.to(tl.float16))


def gelu_fp16(input, approximate="none"):
    # Descriptors need 16-byte aligned memory.
    x = torch.empty(input.shape, dtype=torch.float16, device=input.device)
    x.copy_(input)
    y = torch.empty_like(x)
    n = x.numel()
    if n:
        a = TensorDescriptor(x, [n], [1], [256])
        b = TensorDescriptor(y, [n], [1], [256])
        _k[(triton.cdiv(n, 256),)](a, b, n, TANH=(approximate == "tanh"), B=256)
    return y
