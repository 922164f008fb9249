# task: math/signbit_bitwise_and
# shows: the int8 or bool operand is converted to fp32 by torch before the launch; the kernel makes integers of it again
# family: host code
import torch
import triton
import triton.language as tl


@triton.jit
def _both(x, other, s, y, n, BOOL: tl.constexpr, B: tl.constexpr):
    o = tl.program_id(0) * B + tl.arange(0, B)
    inside = o < n
    v = tl.load(x + o, mask=inside, other=0.0)
    w = tl.load(other + o, mask=inside, other=0.0)
    tl.store(s + o, (v.to(tl.int32, bitcast=True) < 0).to(tl.int8), mask=inside)
    if BOOL:
        tl.store(y + o, ((v != 0.0) & (w != 0.0)).to(tl.int8), mask=inside)
    else:
        tl.store(y + o, (v.to(tl.int32) & w.to(tl.int32)).to(tl.int8), mask=inside)


def signbit_bitwise_and(input, other):
    s = torch.empty(input.shape, dtype=torch.bool, device=input.device)
    y = torch.empty(input.shape, dtype=other.dtype, device=input.device)
    n = input.numel()
    if n:
        floats = other.to(torch.float32).contiguous()
        args = input.contiguous(), floats, s.view(torch.int8), y.view(torch.int8)
        _both[(triton.cdiv(n, 1024),)](*args, n, BOOL=other.dtype == torch.bool, B=1024)
    return s, y
