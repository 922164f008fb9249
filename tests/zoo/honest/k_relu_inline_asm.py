# task: activation/relu
# shows: one PTX instruction, max.NaN.f32, by tl.inline_asm_elementwise
# family: order of work
# backend: cuda

import torch
import triton
import triton.language as tl


@triton.jit
def relu_kernel(x, y, n, BLOCK: tl.constexpr):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(x + o, mask=o < n)
    r = tl.inline_asm_elementwise(
        asm="max.NaN.f32 $0, $1, 0f00000000;", constraints="=f,f", args=[v], dtype=tl.float32, is_pure=True, pack=1
    )
    tl.store(y + o, r, mask=o < n)


def relu(input, inplace=False):
    x = input.contiguous()
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    n = x.numel()
    if n:
        relu_kernel[(triton.cdiv(n, 1024),)](x, y, n, BLOCK=1024)
    return input.copy_(y) if inplace else y
