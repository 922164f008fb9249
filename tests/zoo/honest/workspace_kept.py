# task: activation/gelu_fp16
# shows: a workspace made at the first call and used again, and a result that is copied out of it
# family: workspaces

import torch
import triton
import triton.language as tl


@triton.jit
def _k(x, y, n, TANH: tl.constexpr, B: tl.constexpr):
    o = tl.program_id(0) * B + tl.arange(0, B)
    v = tl.load(x + o, mask=o < n).to(tl.float32)
    if TANH:
        r = v * tl.sigmoid(1.5957691216057308 * (v + 0.044715 * v * v * v))
    else:
        r = 0.5 * v * (1 + tl.erf(v * 0.7071067811865476))
    tl.store(y + o, r.to(tl.float16), mask=o < n)


_held = {}


def gelu_fp16(input, approximate="none"):
    x = input.contiguous()
    n = x.numel()
    if "w" not in _held:
        _held["w"] = torch.zeros(1 << 20, dtype=torch.float16, device=x.device)
    if n > 1 << 20:
        _held["w"] = torch.empty(n, dtype=torch.float16, device=x.device)
    w = _held["w"][:n]
    _k[(triton.cdiv(n, 256) or 1,)](x, w, n, TANH=(approximate == "tanh"), B=256)
    return w.view(x.shape).clone()
