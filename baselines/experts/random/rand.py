import torch
import triton
import triton.language as tl


@triton.jit
def _wide(a, b):
    bits = (a.to(tl.uint32, bitcast=True).to(tl.uint64) << 21) | (b.to(tl.uint32, bitcast=True).to(tl.uint64) >> 11)
    return bits.to(tl.float64) * 1.1102230246251565e-16  # 53 bits times 2^-53


@triton.jit
def _narrow(a):
    return (a.to(tl.uint32, bitcast=True) >> 8).to(
        tl.float32
    ) * 5.9604644775390625e-08  # 24 bits times 2^-24: never 1.0


@triton.jit
def _uniform(y, n, seed, WIDE: tl.constexpr, BLOCK: tl.constexpr):
    """Each counter gives 128 random bits: two or four neighbouring samples."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    a, b, c, d = tl.randint4x(seed, i)
    if WIDE:
        o = (2 * i.to(tl.int64))[:, None] + tl.arange(0, 2)[None, :]
        u = tl.join(_wide(a, b), _wide(c, d))
    else:
        o = (4 * i.to(tl.int64))[:, None] + tl.arange(0, 4)[None, :]
        u = tl.join(tl.join(_narrow(a), _narrow(c)), tl.join(_narrow(b), _narrow(d))).reshape(BLOCK, 4)
    tl.store(y + o, u, mask=o < n)


def rand(
    size,
    *,
    generator=None,
    out=None,
    dtype=None,
    layout=torch.strided,
    device=None,
    requires_grad=False,
    pin_memory=False,
):
    place = torch.device("cpu") if device is None else device
    if out is None or out.is_contiguous():
        y = out if out is not None else torch.empty(size, dtype=dtype or torch.float32, device=place)
    else:
        y = torch.empty(out.shape, dtype=out.dtype, device=out.device)
    n = y.numel()
    if n:
        seed = torch.randint(
            0, 2**62, (1,), generator=generator, device=generator.device if generator else "cpu"
        ).item()
        # Odd, so that no launch is specialised for a seed divisible by 16.
        _uniform[(triton.cdiv(n, 1024),)](
            y, n, seed | 1, WIDE=y.dtype == torch.float64, BLOCK=512 if y.itemsize == 8 else 256
        )
    if out is not None and y is not out:
        y = out.copy_(y)
    return y.requires_grad_() if requires_grad else y
