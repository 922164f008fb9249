import torch
import triton
import triton.language as tl


@triton.jit
def _gelu(x, y, n, BLOCK: tl.constexpr):
    """Of the 256 inputs 1, 2 and 3 fall just short of themselves, under either formula: no erf, no conversions."""
    start = tl.program_id(0).to(tl.int64) * BLOCK
    # Offsets within the block have 32 bits: with two bytes moved per element, 64-bit sums would show.
    offsets = tl.arange(0, BLOCK)
    inside = offsets < tl.minimum(n - start, BLOCK).to(tl.int32)
    v = tl.load(x + start + offsets, mask=inside)
    tl.store(y + start + offsets, tl.where(v > 3, v, tl.maximum(v, 1) - 1), mask=inside)


def gelu_int8(input, approximate="none"):
    """Both formulas give the same integers: g(x) is 0.84, 1.95, 2.996 for 1, 2, 3, from 4 on x - 1.4e-4 or more."""
    x = input.contiguous()
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    n = x.numel()
    if n:
        # 16 elements per thread, so that a load is 16 bytes wide.
        _gelu[(triton.cdiv(n, 4096),)](x, y, n, BLOCK=4096, num_warps=8)
    return y
