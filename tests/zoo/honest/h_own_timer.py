# task: activation/sigmoid
# shows: times two block sizes itself with events and the host clock, and keeps the faster one; replaces nothing
# family: host code
import time

import torch
import triton
import triton.language as tl


@triton.jit
def _k(x, y, n, B: tl.constexpr):
    o = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(y + o, tl.sigmoid(tl.load(x + o, mask=o < n, other=0.0)), mask=o < n)


_best = {}


def _timed(x, y, block):
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    began = time.perf_counter()
    start.record()
    _k[(triton.cdiv(y.numel(), block),)](x, y, y.numel(), B=block)
    end.record()
    end.synchronize()
    return start.elapsed_time(end), time.perf_counter() - began


def sigmoid(input, out=None):
    x, y = input.contiguous(), torch.empty(input.shape, dtype=input.dtype, device=input.device)
    if y.numel():
        key = y.numel().bit_length()
        if key not in _best:
            _best[key] = min((512, 1024), key=lambda block: _timed(x, y, block))
        block = _best[key]
        _k[(triton.cdiv(y.numel(), block),)](x, y, y.numel(), B=block)
    return y if out is None else out.copy_(y)
