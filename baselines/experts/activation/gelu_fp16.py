import torch
import triton
import triton.language as tl


@triton.jit
def _gelu(x, y, n, TANH: tl.constexpr, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < n
    v = tl.load(x + offsets, mask=inside).to(tl.float32)
    if TANH:
        # v / 2 * (1 + tanh(u)) is v * sigmoid(2 u): one exponential and no cancellation
        r = v * tl.sigmoid(1.5957691216057308 * (v + 0.044715 * v * v * v))
    else:
        r = 0.5 * v * (1.0 + tl.erf(v * 0.7071067811865476))
    tl.store(y + offsets, r.to(tl.float16), mask=inside)


def gelu_fp16(input, approximate="none"):
    x = input.contiguous()
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    n = x.numel()
    if n:
        _gelu[(triton.cdiv(n, 2048),)](x, y, n, TANH=approximate == "tanh", BLOCK=2048, num_warps=8)
    return y
