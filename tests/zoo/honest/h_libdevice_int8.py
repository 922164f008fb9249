# task: quantization/layernorm_w8a8
# shows: conversions by libdevice (float2int_rn, rint, div_rn, rsqrt_rn, fast division) in one row kernel and a kernel for the weight's scale
# family: libdevice

import math

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import libdevice


@triton.jit
def _weight_scale(w, s, n, B: tl.constexpr):
    top = tl.zeros((B,), tl.float32)
    for k in range(0, n, B):
        o = k + tl.arange(0, B)
        top = tl.maximum(top, tl.abs(tl.load(w + o, mask=o < n, other=0.0)))
    m = tl.max(top, 0)
    tl.store(s, tl.where(m > 0, tl.math.div_rn(m, 127.0), 1.0))


@triton.jit
def _rows(x, w, s, b, y, n, inv_n, eps, HAS_W: tl.constexpr, HAS_B: tl.constexpr, B: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    o = tl.arange(0, B)
    inside = o < n
    v = tl.load(x + row * n + o, mask=inside, other=0.0)
    top = tl.max(tl.abs(v), 0)
    scale = tl.where(top > 0, tl.math.div_rn(top, 127.0), 1.0)
    q = libdevice.float2int_rn(libdevice.div_rn(v, tl.zeros_like(v) + scale)).to(tl.int8)
    z = q.to(tl.float32) * scale
    mean = tl.sum(z, 0) * inv_n
    d = tl.where(inside, z - mean, 0.0)
    r = d * libdevice.rsqrt_rn(tl.sum(d * d, 0) * inv_n + eps)
    if HAS_W:
        ws = tl.load(s)
        wv = tl.load(w + o, mask=inside, other=0.0)
        r *= libdevice.rint(tl.fdiv(wv, tl.zeros_like(wv) + ws)).to(tl.int8).to(tl.float32) * ws
    else:
        r *= 127.0 * (1.0 / 127.0)
    if HAS_B:
        r += tl.load(b + o, mask=inside, other=0.0)
    tl.store(y + row * n + o, r, mask=inside)


def layernorm_w8a8(input, normalized_shape, weight=None, bias=None, eps=1e-5):
    n = math.prod(normalized_shape)
    x = input.contiguous()
    y = torch.empty_like(x)
    if x.numel() == 0:
        return y
    w = x if weight is None else weight.contiguous()
    b = x if bias is None else bias.contiguous()
    s = torch.empty(1, dtype=torch.float32, device=x.device)
    if weight is not None:
        _weight_scale[(1,)](w, s, n, B=1024)
    B = triton.next_power_of_2(n)
    _rows[(x.numel() // n,)](
        x,
        w,
        s,
        b,
        y,
        n,
        1.0 / n,
        float(eps),
        weight is not None,
        bias is not None,
        B,
        num_warps=min(16, max(1, B // 256)),
    )
    return y
