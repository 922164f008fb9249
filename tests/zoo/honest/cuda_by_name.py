# task: activation/gelu_fp16
# shows: names the device, asserts that inputs are on it, sizes the grid by its multiprocessors
# family: host code

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


def gelu_fp16(input, approximate="none"):
    assert input.is_cuda and input.device.type == "cuda"
    assert torch.cuda.is_available()
    x = input.contiguous().to("cuda")
    y = torch.empty(x.shape, device="cuda", dtype=torch.float16)
    with torch.cuda.device(x.device):
        sms = torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
        blocks = max(1, triton.cdiv(x.numel(), 256), min(sms, 1))
        _k[(blocks,)](x, y, x.numel(), TANH=(approximate == "tanh"), B=256)
    torch.cuda.synchronize()
    return y
