# task: fusion/fused_hardshrink_dropout
# shows: the seed stays in a device tensor; a counter's four integers serve the four quarters of the tensor, compared as integers
# family: chance

import torch
import triton
import triton.language as tl


@triton.jit
def _one(x, y, o, n, bits, threshold, scale, lambd, DROP: tl.constexpr):
    v = tl.load(x + o, mask=o < n)
    if DROP:
        keep = bits.to(tl.uint32, bitcast=True).to(tl.int64) >= threshold
        v = tl.where(keep, v * scale, 0.0)
    tl.store(y + o, tl.where(tl.abs(v) > lambd, v, 0.0), mask=o < n)


@triton.jit
def shrink(x, y, seed_ptr, n, quarter, threshold, scale, lambd, DROP: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    a, b, c, d = tl.randint4x(tl.load(seed_ptr), i)
    # A quarter ends where the next one begins.
    _one(x, y, i, tl.minimum(n, quarter), a, threshold, scale, lambd, DROP)
    _one(x, y, i + quarter, tl.minimum(n, 2 * quarter), b, threshold, scale, lambd, DROP)
    _one(x, y, i + 2 * quarter, tl.minimum(n, 3 * quarter), c, threshold, scale, lambd, DROP)
    _one(x, y, i + 3 * quarter, n, d, threshold, scale, lambd, DROP)


def fused_hardshrink_dropout(input, p=0.5, training=True, inplace=False, lambd=0.5):
    x = input.contiguous()
    y = torch.empty_like(x)
    n = x.numel()
    if n:
        seed = torch.randint(0, 2**31 - 1, (1,), device=x.device)
        quarter = triton.cdiv(n, 4)
        shrink[(triton.cdiv(quarter, 256),)](
            x, y, seed, n, quarter, int(p * 2**32), 0.0 if p >= 1 else 1.0 / (1.0 - p), float(lambd),
            DROP=bool(training) and p > 0, BLOCK=256,
        )  # fmt: skip
    if inplace:
        return input.copy_(y)
    return y
