# task: math/floor
# shows: reads and writes by strides without contiguous(); the new result is a slice of rows padded to 128 bytes
# family: layouts

import torch
import triton
import triton.language as tl


@triton.jit
def floor_strided(
    x, y, n, n1, n2, n3, n4, a0, a1, a2, a3, a4, b0, b1, b2, b3, b4, BLOCK: tl.constexpr
):  # fmt: skip
    o = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    ok = o < n
    i4 = o % n4
    i3 = o // n4 % n3
    i2 = o // n4 // n3 % n2
    i1 = o // n4 // n3 // n2 % n1
    i0 = o // n4 // n3 // n2 // n1
    v = tl.load(x + i0 * a0 + i1 * a1 + i2 * a2 + i3 * a3 + i4 * a4, mask=ok)
    if v.dtype.is_floating():
        v = tl.floor(v)
    tl.store(y + i0 * b0 + i1 * b1 + i2 * b2 + i3 * b3 + i4 * b4, v, mask=ok)


def floor(input, out=None):
    y = out
    if y is None:
        shape = input.shape if input.dim() else (1,)
        width = triton.cdiv(shape[-1], 32) * 32 + 32
        y = torch.empty(tuple(shape[:-1]) + (width,), dtype=input.dtype, device=input.device)[..., : shape[-1]]
        if input.dim() == 0:
            y = y[0]
    n = input.numel()
    if n:
        if input.dim() > 5:
            work = torch.empty(input.shape, dtype=input.dtype, device=input.device)
            a, b = input.contiguous().view(-1), work.view(-1)
        else:
            work, a, b = None, input, y
        lead = 5 - a.dim()
        sizes = [1] * lead + list(a.shape)
        sa, sb = [0] * lead + list(a.stride()), [0] * lead + list(b.stride())
        floor_strided[(triton.cdiv(n, 512),)](a, b, n, *sizes[1:], *sa, *sb, BLOCK=512)
        if work is not None:
            y.copy_(work)
    return y
