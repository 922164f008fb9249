"""Quantization schemes shared by tasks, written so that every honest rounding can be enumerated."""

from __future__ import annotations

from contextvars import ContextVar

import torch

ROUNDING: ContextVar[tuple[str, ...]] = ContextVar("rounding", default=())
"""Which of two honest fp32 formulas each quantization uses, in order; default ``divide``."""
_USED: ContextVar[int] = ContextVar("used", default=0)
SLACK: ContextVar[torch.Tensor | None] = ContextVar("slack", default=None)
"""What the last run of a reference reported: how far fair roundings may move each element of its result."""

TABLE: ContextVar[torch.Tensor | None] = ContextVar("table", default=None)
"""256 bytes, by the byte that they replace: the integers of a call that is executed with others, to see what follows."""
TOTALS: ContextVar[bool] = ContextVar("totals", default=False)
"""Whether the kernel may have summed integers by a product with ones, in which they were exchanged as well."""

FORMULAS = ("divide", "multiply", "down", "up")
"""``divide``: round(x / (max / 127)); ``multiply``: round(x * (127 / max)). They differ by one quantum for
90 of 104,857,600 normal draws; both are what the contract says, so both are right. ``down`` and ``up``: as divide,
but quotients within 4 ulps of a half go towards or away from zero, as the GPU's division (2 ulps off) may send them:
16-bit weights lie on a coarse grid, on which exact halves of both signs are common."""
SEEN: ContextVar[list[torch.Tensor] | None] = ContextVar("seen", default=None)
"""Collects the integers that a run of a reference rounds to, in order, where somebody looks for them."""
EXACT = "exact"
"""No rounding at all: the result that quantization approximates."""


def set_rounding(formulas: tuple[str, ...]) -> None:
    """Choose the formulas of the next calls (used by the judge of contracts)."""
    ROUNDING.set(formulas)
    _USED.set(0)


def symmetric(x: torch.Tensor, dim: int | tuple[int, ...], top: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Symmetric integers -top .. top with one scale per slice along ``dim``: scale = max|x| / top (1 if all zero).

    The decision is made in fp32, as the contract says. Returns (q, scale), q integral, in the dtype of ``x`` or, for
    16-bit ``x``, in fp32.
    """
    used, formulas = _USED.get(), ROUNDING.get()
    _USED.set(used + 1)
    formula = formulas[used] if used < len(formulas) else "divide"
    kind = torch.float32 if x.dtype.itemsize < 4 else x.dtype
    x32 = x.to(torch.float32)
    peak = x32.abs().amax(dim=dim, keepdim=True) if x.numel() else x32.sum(dim=dim, keepdim=True)
    # Division by a Python number is a product with its inverse on a GPU, a last place off.
    one, full = torch.ones_like(peak), torch.full_like(peak, top)
    scale = torch.where(peak == 0, one, peak / full)
    if formula == EXACT:
        return x.to(kind) / scale.to(kind), scale.to(kind)
    quotient = x32 / scale
    q = torch.round(quotient)
    if formula == "multiply":
        q = torch.round(x32 * torch.where(peak == 0, one, full / peak))
    elif formula == "truncate":  # no contract says so: the judge asks what a wrong kernel has done
        q = torch.trunc(quotient)
    elif formula in ("down", "up"):
        size = quotient.abs()
        floor = torch.floor(size)
        near = (size - floor - 0.5).abs() <= 4 * torch.finfo(torch.float32).eps * size
        # A scale that is a last place too large sends numbers of both signs towards zero.
        q = torch.where(near, torch.sign(quotient) * (floor if formula == "down" else floor + 1), q)
    q = q.clamp(-top, top)
    _note(q)
    return q.to(kind), scale.to(kind)


def _note(q: torch.Tensor) -> None:
    seen = SEEN.get()
    if seen is not None:
        seen.append(q.to(torch.int64).flatten())


def int8_symmetric(x: torch.Tensor, dim: int | tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Symmetric int8: -127 .. 127."""
    return symmetric(x, dim, 127)


def int4_symmetric(x: torch.Tensor, dim: int | tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Symmetric int4: -7 .. 7."""
    return symmetric(x, dim, 7)


def _exchanged(code: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    return table.to(code.device)[code.to(torch.int64) & 255].to(torch.int64)


def operand(q: torch.Tensor) -> torch.Tensor:
    """What an int8 product sees of integers, or what a rounding to int8 gives: themselves, unless a table says otherwise."""
    table = TABLE.get()
    if table is None:
        return q
    found = _exchanged(q.round(), table)
    return (found - 256 * (found > 127)).to(q.dtype)


def total(q: torch.Tensor) -> torch.Tensor:
    """The sum of integers along the last axis, kept: added up, or a product with ones, which no table exchanges."""
    return (operand(q) if TOTALS.get() else q).sum(-1, keepdim=True)


def jump(q: torch.Tensor) -> torch.Tensor:
    """How far ``operand`` moves where integers are rounded to a neighbour."""
    here = operand(q)
    return torch.maximum(*((operand((q + d).clamp(-127, 127)) - here).abs() for d in (-1, 1)))


def packed(q: torch.Tensor) -> torch.Tensor:
    """What comes out of bytes that hold two neighbours along the last axis, the first one in the low four bits."""
    table = TABLE.get()
    if table is None:
        return q
    low, high = q.round().to(torch.int64).unflatten(-1, (-1, 2)).unbind(-1)
    byte = _exchanged((low & 15) | (high & 15) << 4, table)
    halves = torch.stack((byte & 15, byte >> 4), -1).flatten(-2)
    return (halves - 16 * (halves > 7)).to(q.dtype)


def rounded(x: torch.Tensor, relative: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(round half to even, where an ``x`` known to this relative accuracy could round either way)."""
    if ROUNDING.get()[:1] == (EXACT,):
        return x, torch.zeros_like(x)
    floor = torch.floor(x)
    _note(floor if ROUNDING.get()[:1] == ("truncate",) else torch.round(x))
    return torch.round(x), ((x - floor - 0.5).abs() <= relative * x).to(x.dtype)


def report_slack(slack: torch.Tensor) -> None:
    """Tell the judge how far fair roundings may move each element of the result."""
    SLACK.set(slack)
