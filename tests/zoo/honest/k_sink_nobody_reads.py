# task: activation/relu
# shows: programs write their numbers to one place that nobody reads: a race without any effect on the result
# family: order of work

import torch
import triton
import triton.language as tl


@triton.jit
def relu_kernel(x, y, last, n, BLOCK: tl.constexpr):
    p = tl.program_id(0)
    o = p * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(x + o, mask=o < n)
    tl.store(y + o, tl.maximum(v, 0, propagate_nan=tl.PropagateNan.ALL), mask=o < n)
    tl.store(last, p)


def relu(input, inplace=False):
    x = input.contiguous()
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    last = torch.empty(1, dtype=torch.int32, device=x.device)
    n = x.numel()
    if n:
        relu_kernel[(triton.cdiv(n, 256),)](x, y, last, n, BLOCK=256)
    return input.copy_(y) if inplace else y
