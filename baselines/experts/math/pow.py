import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

CHEAP = (0, 1, 2, 3, -1, 0.5, -0.5)


@triton.jit
def _pow(a, b, y, n, POWER: tl.constexpr, BLOCK: tl.constexpr):
    """POWER is None for an exponent tensor b, a number that needs no pow, or "any" for the number b."""
    o = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = o < n
    x = tl.load(a + o, mask=inside)
    if POWER is None:
        v = libdevice.pow(x, tl.load(b + o, mask=inside))
    elif POWER == 0:
        v = tl.full(x.shape, 1.0, tl.float32)
    elif POWER == 1:
        v = x
    elif POWER == 2:
        v = x * x
    elif POWER == 3:
        v = x * x * x
    elif POWER == -1:
        v = 1.0 / x
    elif POWER == 0.5:
        v = tl.sqrt_rn(x)
    elif POWER == -0.5:
        v = tl.rsqrt(x)
    else:
        v = libdevice.pow(x, tl.full(x.shape, b, tl.float32))
    tl.store(y + o, v, mask=inside)


def pow(input_tensor, exponent, out=None):
    x, tensor = input_tensor, isinstance(exponent, torch.Tensor)
    shape = torch.broadcast_shapes(x.shape, exponent.shape) if tensor else x.shape
    y = torch.empty(shape, dtype=x.dtype, device=x.device) if out is None else out
    target = y if y.is_contiguous() else torch.empty(shape, dtype=x.dtype, device=x.device)
    x = x.expand(shape).contiguous()
    b = exponent.expand(shape).contiguous() if tensor else float(exponent)
    power = None if tensor else exponent if exponent in CHEAP else "any"
    n = target.numel()
    if n:
        _pow[(triton.cdiv(n, 1024),)](x, b, target, n, POWER=power, BLOCK=1024, num_warps=8)
    return y if target is y else y.copy_(target)
