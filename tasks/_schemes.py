"""Quantization schemes shared by tasks, written so that every honest rounding can be enumerated."""

from __future__ import annotations

from contextvars import ContextVar

import torch

ROUNDING: ContextVar[tuple[str, ...]] = ContextVar("rounding", default=())
"""Which of two honest fp32 formulas each call of ``int8_symmetric`` uses, in order; default ``divide``."""
_USED: ContextVar[int] = ContextVar("used", default=0)

FORMULAS = ("divide", "multiply", "down", "up")
"""``divide``: round(x / (max / 127)); ``multiply``: round(x * (127 / max)). They differ by one quantum for
90 of 104,857,600 normal draws; both are what the contract says, so both are right. ``down`` and ``up``: as divide,
but quotients within 4 ulps of a half go down or up, as the GPU's division (2 ulps off) may send them."""


def set_rounding(formulas: tuple[str, ...]) -> None:
    """Choose the formulas of the next calls (used by the judge of contracts)."""
    ROUNDING.set(formulas)
    _USED.set(0)


def int8_symmetric(x: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Symmetric int8 with one scale per slice along ``dim``: scale = max|x| / 127 (1 if all zero).

    The decision is made in fp32, as the contract says. Returns (q, scale) in the dtype of ``x``, q integral.
    """
    used, formulas = _USED.get(), ROUNDING.get()
    _USED.set(used + 1)
    formula = formulas[used] if used < len(formulas) else "divide"
    x32 = x.to(torch.float32)
    peak = x32.abs().amax(dim=dim, keepdim=True) if x.numel() else x32.sum(dim=dim, keepdim=True)
    scale = torch.where(peak == 0, torch.ones_like(peak), peak / 127)
    quotient = x32 / scale
    q = torch.round(quotient)
    if formula == "multiply":
        q = torch.round(x32 * torch.where(peak == 0, torch.ones_like(peak), 127 / peak))
    elif formula in ("down", "up"):
        floor = torch.floor(quotient)
        near = (quotient - floor - 0.5).abs() <= 4 * torch.finfo(torch.float32).eps * quotient.abs()
        q = torch.where(near, floor if formula == "down" else floor + 1, q)
    return q.clamp(-127, 127).to(x.dtype), scale.to(x.dtype)
