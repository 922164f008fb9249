import torch
import triton
import triton.language as tl


@triton.jit
def _uniform(y, n, seed, WIDE: tl.constexpr, BLOCK: tl.constexpr):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if WIDE:
        a, b, _, _ = tl.randint4x(seed, o)
        bits = (a.to(tl.uint32, bitcast=True).to(tl.uint64) << 21) | (b.to(tl.uint32, bitcast=True).to(tl.uint64) >> 11)
        u = bits.to(tl.float64) * 1.1102230246251565e-16  # 53 bits times 2^-53
    else:
        a = tl.randint(seed, o).to(tl.uint32, bitcast=True)
        u = (a >> 8).to(tl.float32) * 5.9604644775390625e-08  # 24 bits times 2^-24: never 1.0
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
    y = out if out is not None else torch.empty(size, dtype=dtype or torch.float32, device=place)
    n = y.numel()
    if n:
        seed = torch.randint(
            0, 2**62, (1,), generator=generator, device=generator.device if generator else "cpu"
        ).item()
        _uniform[(triton.cdiv(n, 1024),)](y, n, seed, WIDE=y.dtype == torch.float64, BLOCK=1024)
    return y.requires_grad_() if requires_grad else y
