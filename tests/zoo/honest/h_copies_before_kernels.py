# task: index/expand_where
# shows: torch broadcasts and reorders whole tensors by copies first, the kernel reads dense memory only; the mask travels as bytes
# family: host code
import torch
import triton
import triton.language as tl


@triton.jit
def _where(x, c, z, y, n, B: tl.constexpr):
    o = tl.program_id(0) * B + tl.arange(0, B)
    m = tl.load(c + o, mask=o < n, other=0) != 0
    v, w = tl.load(x + o, mask=o < n, other=0.0), tl.load(z + o, mask=o < n, other=0.0)
    tl.store(y + o, tl.where(m, v, w), mask=o < n)


def expand_where(input, target_sizes, cond, other):
    x = input.expand(target_sizes).contiguous()
    c = cond.expand(x.shape).contiguous().view(torch.uint8)
    z = other.expand(x.shape).clone(memory_format=torch.contiguous_format)
    y = torch.empty_like(x)
    if y.numel():
        _where[(triton.cdiv(y.numel(), 1024),)](x, c, z, y, y.numel(), B=1024)
    return y
