# task: fusion/fused_cos_signbit
# shows: allocates on torch.cuda.current_device() (an int), forks a second kernel to a side stream and joins it again, record_stream
# family: host code

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice


@triton.jit
def _cos(x, y, n, SIGN: tl.constexpr, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    c = libdevice.cos(tl.load(x + i, mask=i < n, other=0.0))
    if SIGN:
        tl.store(y + i, c < 0, mask=i < n)
    else:
        tl.store(y + i, c, mask=i < n)


_side = None


def side_stream():
    global _side
    if _side is None:
        _side = torch.cuda.Stream(device=torch.cuda.current_device())
    return _side


def fused_cos_signbit(input):
    x = input.contiguous()
    device = torch.cuda.current_device()
    values = torch.empty(x.shape, dtype=torch.float32, device=device)
    signs = torch.empty(x.shape, dtype=torch.bool, device=device)
    n = x.numel()
    if n == 0:
        return values, signs
    grid = (triton.cdiv(n, 512),)
    main, side = torch.cuda.current_stream(), side_stream()
    side.wait_stream(main)
    with torch.cuda.stream(side):
        _cos[grid](x, signs, n, SIGN=True, B=512)
    _cos[grid](x, values, n, SIGN=False, B=512)
    for t in (x, signs):
        t.record_stream(side)
    done = torch.cuda.Event()
    done.record(side)
    main.wait_event(done)
    return values, signs
