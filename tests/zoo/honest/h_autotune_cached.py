# task: activation/relu
# shows: autotuned with cache_results=True, so that Triton keeps the times in a file; two autotuners share one file
# family: autotuning

import torch
import triton
import triton.language as tl


def _kernel(x, y, n, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < n
    v = tl.load(x + offs, mask=mask)
    tl.store(y + offs, tl.where(v < 0, 0.0, v), mask=mask)


CONFIGS = [triton.Config({"BLOCK": b}, num_warps=w) for b, w in ((128, 1), (512, 4), (2048, 8))]
TUNED = [triton.autotune(configs=CONFIGS, key=["n"], cache_results=True)(triton.jit(_kernel)) for _ in range(2)]


def relu(input, inplace=False):
    x = input.contiguous()
    n = x.numel()
    y = torch.empty_like(x)
    if n:
        for tuned in TUNED:
            tuned[lambda meta: (triton.cdiv(n, meta["BLOCK"]),)](x, y, n)
    if inplace:
        input.copy_(y)
        return input
    return y
