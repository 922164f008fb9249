# task: fusion/fused_relu_sqrt
# shows: int64 inputs are converted to fp32 by torch before the launch, as a view, as a copy, and into a buffer of its own
# family: host code
import torch
import triton
import triton.language as tl


@triton.jit
def _relu_sqrt(x, y, n, B: tl.constexpr):
    o = tl.program_id(0) * B + tl.arange(0, B)
    inside = o < n
    tl.store(y + o, tl.sqrt_rn(tl.maximum(tl.load(x + o, mask=inside, other=0.0), 0.0)), mask=inside)


def _floats(input):
    if input.dtype == torch.float32:
        return input.contiguous()
    if input.dim() > 1:
        return input.contiguous().to(torch.float32)  # a copy of the argument, then a conversion of all of it
    if input.numel() % 2:
        return torch.empty(input.shape, dtype=torch.float32, device=input.device).copy_(input)
    return input.float().contiguous()


def fused_relu_sqrt(input, inplace=False, out=None):
    x, n = _floats(input), input.numel()
    y = torch.empty(input.shape, dtype=torch.float32, device=input.device)
    if n:
        _relu_sqrt[(triton.cdiv(n, 1024),)](x, y, n, B=1024)
    target = input if inplace else out
    return y if target is None else target.copy_(y)
