# task: math/abs
# shows: two fp32 numbers are one int64, one mask clears both sign bits
# family: packing

import torch
import triton
import triton.language as tl


@triton.jit
def abs_pairs(x, y, pairs, BLOCK: tl.constexpr):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    two = tl.load(x + o, mask=o < pairs, other=0)
    tl.store(y + o, two & 0x7FFFFFFF7FFFFFFF, mask=o < pairs)


def abs(input_tensor, out=None):
    n = input_tensor.numel()
    pairs = (n + 1) // 2
    # An odd last element gets a zero beside it.
    x = torch.zeros(2 * pairs, dtype=torch.float32, device=input_tensor.device)
    x[:n].view(input_tensor.shape).copy_(input_tensor)
    y = torch.empty(pairs, dtype=torch.int64, device=x.device)
    if n:
        abs_pairs[(triton.cdiv(pairs, 512),)](x.view(torch.int64), y, pairs, BLOCK=512)
    result = y.view(torch.float32)[:n].view(input_tensor.shape)
    if out is not None:
        out.copy_(result)
        return out
    return result
