"""Rows that fit a program are read once; longer ones twice, the second time backwards: the cache still has the end."""

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

# MODE: 1 and 2 for these p, 0 for infinity, 3 for any other.


@triton.jit
def _term(v, p, MODE: tl.constexpr):
    """What an element contributes to the norm."""
    v = tl.abs(v)
    if MODE == 2:
        v = v * v
    elif MODE == 3:
        v = libdevice.pow(v, p)
    return v


@triton.jit
def _join(a, b, MODE: tl.constexpr):
    return tl.maximum(a, b) if MODE == 0 else a + b


@triton.jit
def _norm(terms, p, MODE: tl.constexpr):
    """The norm of each row of terms."""
    if MODE == 0:
        total = tl.max(terms, 1)
    else:
        total = tl.sum(terms, 1)
    if MODE == 2:
        total = tl.sqrt_rn(total)
    elif MODE == 3:
        total = libdevice.pow(total, 1.0 / p)
    return total


@triton.jit
def _distance(x1, x2, y, rows, D, step1, step2, p, floor, eps, MODE: tl.constexpr, ONCE: tl.constexpr,
              BR: tl.constexpr, BD: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    d = tl.arange(0, BD)[None, :]
    inside = (row < rows)[:, None] & (d < D)
    p1 = x1 + (row * step1)[:, None] + d
    p2 = x2 + (row * step2)[:, None] + d
    if ONCE:
        a, b = tl.load(p1, mask=inside, other=0.0), tl.load(p2, mask=inside, other=0.0)
        scale1 = 1.0 / tl.maximum(_norm(_term(a, p, MODE), p, MODE), floor)
        scale2 = 1.0 / tl.maximum(_norm(_term(b, p, MODE), p, MODE), floor)
        gap = tl.where(inside, a * scale1[:, None] - b * scale2[:, None] + eps, 0.0)
        terms = _term(gap, p, MODE)
    else:
        one, two = tl.zeros((BR, BD), tl.float32), tl.zeros((BR, BD), tl.float32)
        terms = tl.zeros((BR, BD), tl.float32)
        for d0 in range(0, D, BD):
            inside = (row < rows)[:, None] & (d0 + d < D)
            one = _join(one, _term(tl.load(p1 + d0, mask=inside, other=0.0), p, MODE), MODE)
            two = _join(two, _term(tl.load(p2 + d0, mask=inside, other=0.0), p, MODE), MODE)
        scale1 = 1.0 / tl.maximum(_norm(one, p, MODE), floor)[:, None]
        scale2 = 1.0 / tl.maximum(_norm(two, p, MODE), floor)[:, None]
        last = (D - 1) // BD * BD
        for back in range(0, D, BD):
            d0 = last - back
            inside = (row < rows)[:, None] & (d0 + d < D)
            a, b = tl.load(p1 + d0, mask=inside, other=0.0), tl.load(p2 + d0, mask=inside, other=0.0)
            terms = _join(terms, _term(tl.where(inside, a * scale1 - b * scale2 + eps, 0.0), p, MODE), MODE)
    tl.store(y + row, _norm(terms, p, MODE), mask=row < rows)


def fused_pairwise_distance_normalize(x1, x2, p_norm=2.0, eps_norm=1e-12, eps_distance=1e-6, keepdim=False):
    x1, x2 = x1.contiguous(), x2.contiguous()
    D = x1.shape[1]
    rows = x1.shape[0] if x2.shape[0] == 1 else x2.shape[0]
    y = torch.empty((rows, 1), dtype=x1.dtype, device=x1.device)
    if rows:
        BD = min(16384, triton.next_power_of_2(D))
        BR = min(triton.next_power_of_2(rows), max(1, 2048 // BD))
        mode = 0 if p_norm == float("inf") else int(p_norm) if p_norm in (1, 2) else 3
        _distance[(triton.cdiv(rows, BR),)](
            x1, x2, y, rows, D, D if x1.shape[0] == rows else 0, D if x2.shape[0] == rows else 0,
            float(p_norm) if mode == 3 else 1.0, float(eps_norm), float(eps_distance), MODE=mode, ONCE=D <= BD,
            BR=BR, BD=BD, num_warps=4 if BR * BD <= 2048 else 8 if BR * BD <= 4096 else 16 if BR * BD <= 8192 else 32,
        )  # fmt: skip
    return y if keepdim else y.squeeze(-1)
