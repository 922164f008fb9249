# task: random/rand
# shows: tl.philox with 32- or 64-bit counters, the random bits are or-ed below the exponent of one, one is taken off
# family: chance

import torch
import triton
import triton.language as tl


@triton.jit
def _uniform32(r):
    return ((r >> 9) | 0x3F800000).to(tl.float32, bitcast=True) - 1.0


@triton.jit
def _uniform64(r):
    return ((r >> 12) | 0x3FF0000000000000).to(tl.float64, bitcast=True) - 1.0


@triton.jit
def rand_kernel(y, seed, n, DOUBLE: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    if DOUBLE:
        c0 = i.to(tl.uint64)
        zero = c0 * 0
        a, b, c, d = tl.philox(seed, c0, zero, zero, zero)
        a, b, c, d = _uniform64(a), _uniform64(b), _uniform64(c), _uniform64(d)
    else:
        lo = i.to(tl.uint32)
        hi = (i >> 32).to(tl.uint32)
        a, b, c, d = tl.philox(seed, lo, hi, lo * 0, lo * 0)
        a, b, c, d = _uniform32(a), _uniform32(b), _uniform32(c), _uniform32(d)
    tl.store(y + 4 * i, a, mask=4 * i < n)
    tl.store(y + 4 * i + 1, b, mask=4 * i + 1 < n)
    tl.store(y + 4 * i + 2, c, mask=4 * i + 2 < n)
    tl.store(y + 4 * i + 3, d, mask=4 * i + 3 < n)


def rand(
    size, *, generator=None, out=None, dtype=None, layout=torch.strided, device=None, requires_grad=False, pin_memory=False
):  # fmt: skip
    if out is not None:
        y = out if out.is_contiguous() else torch.empty(out.shape, dtype=out.dtype, device=out.device)
    else:
        y = torch.empty(size, dtype=dtype or torch.float32, device=device)
    n = y.numel()
    where = generator.device if generator is not None else "cpu"
    # From 2^32 on, so that the seed is always an int64 for the kernel.
    seed = torch.randint(2**32, 2**62, (1,), generator=generator, device=where, dtype=torch.int64).item()
    if n:
        double = y.dtype == torch.float64
        rand_kernel[(triton.cdiv(n, 1024),)](y, seed, n, DOUBLE=double, BLOCK=256)
    if out is not None:
        if y is not out:
            out.copy_(y)
        y = out
    if requires_grad:
        y.requires_grad_(True)
    return y
