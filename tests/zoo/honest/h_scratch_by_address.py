# task: activation/gelu_fp16
# shows: keeps scratch memory and a table of sizes by the address and shape of the input; every call fills both anew or only reads sizes
# family: workspaces
import torch
import triton
import triton.language as tl

_scratch = {}


@triton.jit
def _cube(x, s, sizes, B: tl.constexpr):
    n = tl.load(sizes)
    o = tl.program_id(0) * B + tl.arange(0, B)
    v = tl.load(x + o, mask=o < n, other=0.0).to(tl.float32)
    tl.store(s + o, v + 0.044715 * v * v * v, mask=o < n)


@triton.jit
def _gelu(x, s, y, sizes, TANH: tl.constexpr, B: tl.constexpr):
    n = tl.load(sizes)
    o = tl.program_id(0) * B + tl.arange(0, B)
    v = tl.load(x + o, mask=o < n, other=0.0).to(tl.float32)
    if TANH:
        w = tl.load(s + o, mask=o < n, other=0.0)
        r = v * tl.sigmoid(1.5957691216057308 * w)
    else:
        r = 0.5 * v * (1.0 + tl.erf(v * 0.7071067811865476))
    tl.store(y + o, r.to(tl.float16), mask=o < n)


def gelu_fp16(input, approximate="none"):
    x, n = input.contiguous(), input.numel()
    y = torch.empty(input.shape, dtype=input.dtype, device=input.device)
    if n:
        key = (input.data_ptr(), n)
        if key not in _scratch:
            sizes = torch.full((1,), n, dtype=torch.int32, device=input.device)
            _scratch[key] = torch.empty(n, dtype=torch.float32, device=input.device), sizes
        s, sizes = _scratch[key]
        grid = (triton.cdiv(n, 512),)
        if approximate == "tanh":
            _cube[grid](x, s, sizes, B=512)
        _gelu[grid](x, s, y, sizes, TANH=approximate == "tanh", B=512)
    return y
