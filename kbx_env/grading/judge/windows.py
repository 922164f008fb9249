"""Fractional max pooling: the windows of each plane must be fair ones, drawn afresh, and the maxima theirs.

Along one axis of ``size`` with ``count`` windows of ``kernel`` elements, a random u in [0, 1) gives the starts
floor((i + u) a) - floor(u a) with a = (size - kernel) / (count - 1), the last being size - kernel (Graham, 2014, as torch
computes it). Only finitely many sequences come out of that, each with the share of u that leads to it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from kbx_env.grading.judge import randomness
from kbx_env.grading.judge.randomness import Line
from kbx_env.grading.judge.ruling import PASSED, Answer, Ruling
from kbx_env.spec.criteria import Windows

SIGMAS = 7.0
MOST = 4096
"""Pairs of sequences that are tried on a plane; a case with more of them belongs to no task."""


@functools.cache
def sequences(size: int, count: int, kernel: int) -> tuple[tuple[tuple[int, ...], ...], tuple[float, ...]]:
    """Every sequence of starts and its probability."""
    if count == 1:
        return ((size - kernel,),), (1.0,)
    a = (size - kernel) / (count - 1)
    cuts = {0.0, 1.0}
    for i in range(count):
        cuts.update(m / a - i for m in range(math.ceil(i * a), math.ceil((i + 1) * a) + 1) if 0 < m / a - i < 1)
    edges = sorted(cuts)
    found: dict[tuple[int, ...], float] = {}
    for low, high in zip(edges, edges[1:], strict=False):
        if high - low > 1e-9:
            u = (low + high) / 2
            starts = [math.floor((i + u) * a) - math.floor(u * a) for i in range(count - 1)]
            key = (*starts, size - kernel)
            found[key] = found.get(key, 0.0) + high - low
    return tuple(found), tuple(found.values())


def _along(x: torch.Tensor, starts: torch.Tensor, kernel: int) -> torch.Tensor:
    """Maxima of the windows along the last axis: (..., size) -> (sequences, ..., count)."""
    out = x[..., starts]
    for k in range(1, kernel):
        out = torch.maximum(out, x[..., starts + k])
    return out.movedim(-2, 0)


def _plane(x: torch.Tensor, y: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor, kernel: tuple[int, int]) -> int:
    """Number of the pair (row sequence, column sequence) that gives ``y``, or -1."""
    tall = _along(x.mT, rows, kernel[0]).mT  # (row sequences, rows of windows, width)
    whole = _along(tall, columns, kernel[1])  # (column sequences, row sequences, ...)
    hits = (whole == y).flatten(2).all(-1)
    return int(hits.mT.flatten().to(torch.uint8).argmax()) if bool(hits.any()) else -1


def rule(
    truth: Windows, args: Mapping[str, Any], answers: Sequence[Answer], *, timed: bool = False,
    earlier: list[Any] | None = None,
) -> Ruling:  # fmt: skip
    """Every plane explained by one pair of sequences; over planes, calls and cases the sequences must look drawn.

    ``earlier``: the random numbers that the calls of the grading's other cases seem to have drawn; grows.
    """
    x = args[truth.tensor].clamp_min(0)
    size = args[truth.kernel]
    kernel = (size, size) if isinstance(size, int) else tuple(size)
    y = answers[0].outputs[0]
    if not y.numel():
        return PASSED
    (rows, row_shares), (columns, column_shares) = (
        sequences(n, m, k) for n, m, k in zip(x.shape[-2:], y.shape[-2:], kernel, strict=True)
    )
    planes = x.reshape(-1, *x.shape[-2:])
    picked = []
    for answer in answers[: 1 if timed else None]:
        mine = answer.outputs[0].to(planes.device).reshape(-1, *y.shape[-2:])
        at = [torch.tensor(s, device=planes.device) for s in (rows, columns)]
        found = [_plane(p, o, at[0], at[1], kernel) for p, o in zip(planes, mine, strict=True)]
        if min(found) < 0:
            return Ruling(False, f"wrong values: {found.count(-1)} of {len(found)} planes fit no sequence of windows")
        wrong = _positions(planes, mine, answer, found, (rows, columns), kernel)
        if wrong:
            return Ruling(False, wrong)
        picked.append(found)
    shares = [p * q for p in row_shares for q in column_shares]
    if timed or len(shares) == 1:
        return PASSED
    ruling = _drawn(picked, shares)
    if not ruling.passed:
        return ruling
    numbers = [] if earlier is None else earlier
    # Other numbers in every case: they would have them in common.
    draw = torch.Generator().manual_seed(0x81 + len(numbers))
    for found in picked:
        ids = torch.tensor(found)
        numbers.append(
            (_numbers(ids // len(columns), row_shares, draw), _numbers(ids % len(columns), column_shares, draw))
        )
    wrong = _together(numbers)
    return Ruling(False, f"the windows are not drawn independently: {wrong}") if wrong else PASSED


def _numbers(picked: torch.Tensor, shares: Sequence[float], draw: torch.Generator) -> torch.Tensor:
    """For each plane a number by its sequence, uniform over all if the sequences come as often as they should, minus 1/2."""
    share = torch.tensor(shares, dtype=torch.float64)
    below = share.cumsum(0) - share
    return below[picked] + share[picked] * torch.rand(picked.shape, generator=draw, dtype=torch.float64) - 0.5


def _together(calls: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> str:
    """What the numbers of planes, axes and calls have in common. A call has few planes; all calls of a grading tell more."""
    rows, columns = (Line(torch.cat(axis), 1 / 12, 0.5) for axis in zip(*calls, strict=True))
    for a, b, own, name in ((rows, rows, True, "rows"), (columns, columns, True, "columns"), (rows, columns, False, "axes")):
        found = randomness.shifted(a, b, own=own)
        if found:
            return f"{name} of planes go together, {found}"
    for axis in zip(*calls, strict=True):
        total, terms = 0.0, 0
        for i, a in enumerate(axis):
            for b in axis[:i]:
                n = min(a.numel(), b.numel())
                total, terms = total + float(a[:n] @ b[:n]), terms + n
        if abs(total) > float(randomness.limit(torch.tensor(float(terms)), 1 / 144, 0.25, 1)):
            return "planes of different calls go together"
    return ""


def _positions(
    planes: torch.Tensor, mine: torch.Tensor, answer: Answer, found: Sequence[int], starts: Any, kernel: tuple[int, int]
) -> str:
    if len(answer.outputs) < 2:
        return ""
    rows, columns = starts
    width = planes.shape[-1]
    at = answer.outputs[1].to(planes.device).reshape(mine.shape)
    if bool((at < 0).any()) or bool((at >= planes.shape[-2] * width).any()):
        return "wrong positions: outside of the plane"
    if not torch.equal(planes.flatten(1).gather(1, at.flatten(1)), mine.flatten(1)):
        return "wrong positions: they do not hold the maxima"
    for place, pair in zip(at.cpu(), found, strict=True):
        top = torch.tensor(rows[pair // len(columns)])[:, None]
        left = torch.tensor(columns[pair % len(columns)])[None, :]
        i, j = place // width, place % width
        if not bool(((i >= top) & (i < top + kernel[0]) & (j >= left) & (j < left + kernel[1])).all()):
            return "wrong positions: outside of their windows"
    return ""


def _drawn(picked: Sequence[Sequence[int]], shares: Sequence[float]) -> Ruling:
    """How often each pair of sequences came, and whether calls repeat each other."""
    for found in picked:
        n = len(found)
        chi = sum((found.count(k) - n * p) ** 2 / (n * p) for k, p in enumerate(shares))
        dof = len(shares) - 1
        # Few planes make rare counts: their sum is far from normal, and its own variance is added.
        wide = math.sqrt(2 * dof + sum(1 / p for p in shares) / n)
        if chi > dof + SIGMAS * wide:
            return Ruling(False, "the windows are not drawn as they should be: some come far too often")
    if len(picked) > 1:
        n = len(picked[0])
        same = sum(a == b for a, b in zip(picked[0], picked[1], strict=True))
        p = sum(s * s for s in shares)
        if n * p * (1 - p) > 4 and same > n * p + SIGMAS * math.sqrt(n * p * (1 - p)):
            return Ruling(False, "two calls drew the same windows too often")
    return PASSED
