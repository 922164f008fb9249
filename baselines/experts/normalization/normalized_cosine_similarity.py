# parts: reduce
"""One pass: the product, both sums of squares, and both sums of powers where p_norm is not 2."""

import torch
import triton
import triton.language as tl


@triton.jit
def _power(a, p: tl.constexpr):
    y = a
    for _ in tl.static_range(p - 1):
        y = y * a
    return y


@triton.jit
def value(v, w, i, inside, s, t, MODE: tl.constexpr):
    v, w = tl.where(inside, v, 0.0), tl.where(inside, w, 0.0)
    if MODE == 2:
        return v * w, v * v, w * w, tl.zeros_like(v), tl.zeros_like(w)
    else:
        return v * w, v * v, w * w, _power(tl.abs(v), MODE), _power(tl.abs(w), MODE)


@triton.jit
def combine(a, b, c, d, e, f, g, h, i, j):
    return a + f, b + g, c + h, d + i, e + j


@triton.jit
def _scale(square, power, floor, P: tl.constexpr):
    """(norm before normalising, what it is divided by)."""
    root = tl.sqrt_rn(square)
    if P == 2:
        norm = root
    elif P == 1:
        norm = power
    else:
        norm = tl.exp2(tl.log2(tl.maximum(power, 1e-37)) / P)
    return root, tl.maximum(norm, floor)


@triton.jit
def finish(state, n, s, t, MODE: tl.constexpr):
    product, xx, yy, xp, yp = state
    x, x_scale = _scale(xx, xp, t, MODE)
    y, y_scale = _scale(yy, yp, t, MODE)
    u, v = tl.maximum(x / x_scale, s), tl.maximum(y / y_scale, s)
    return (product / x_scale / y_scale / (u * v),)


def normalized_cosine_similarity(x1, x2, dim=1, eps_similarity=1e-8, p_norm=2, eps_norm=1e-12):
    f = torch.float32
    return reduce(x1, dim, w=x2, states=(f,) * 5, dtypes=(f,), s=float(eps_similarity), t=float(eps_norm), mode=p_norm)[
        0
    ]
