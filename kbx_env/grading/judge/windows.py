"""Judges fractional max pooling: each plane has fair windows, drawn afresh, and their maxima.

Along one axis of ``size`` with ``count`` windows of ``kernel`` elements, a random u in [0, 1) gives the starts
floor((i + u) a) - floor(u a) with a = (size - kernel) / (count - 1); the last window starts at size - kernel (Graham, 2014, as
torch computes it). Only finitely many sequences of starts exist, each with the share of u that leads to it.

Kernels and torch compute i + u in fp32. Where (i + u) a is next to a whole number, rounding decides on which side it falls, for
each window by itself: the starts of some windows are those of the next sequence. With 1,601 windows this happened to one plane
in some thousands. ``boundaries`` lists these mixtures, and ``_Planes.usual`` says how many planes may have one.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kbx_env.grading.judge import randomness
from kbx_env.grading.judge.randomness import Line
from kbx_env.grading.judge.ruling import PASSED, Answer, Ruling
from kbx_env.spec.criteria import Windows

ROUNDINGS = 4.0
"""fp32 roundings on the way to (i + u) a: of the sum, of a and of the product, and one to spare."""
HALF_ULP = 2.0**-24
"""Largest relative error of one fp32 rounding."""
RARE = 1e-9
"""Probability with which a right kernel has more mixtures than are allowed."""
BINS, UNEVEN = 10, 60.7
"""Shares of [0, 1) in which the numbers of all planes are counted, and the chi-square that even ones exceed with probability
``RARE``: of nine degrees of freedom."""
STEPS = (1, 2, 3, 4)
"""Planes between the numbers of a line that are compared with those of a line of other steps: a kernel may draw number 3 p for the
rows of plane p and number 2 p + 1 for its columns, and use a third of them twice."""
LAG = 3
"""Further first planes of such lines: with number 2 p for the rows of plane p and p + 3 for its columns, rows of planes 2, 3, 4 ..
and columns of planes 1, 3, 5 .. go together."""
Starts = tuple[int, ...]


@dataclass(frozen=True)
class Boundary:
    """Two sequences of starts that meet at a value of u where rounding decides.

    Attributes:
        low: starts below that value.
        high: starts above it; windows that differ from ``low`` may start at either.
        nearest: number of a sequence next to that value, for statistics.
        share: probability that u is so near that rounding decides for some window.
    """

    low: Starts
    high: Starts
    nearest: int
    share: float


@functools.cache
def _intervals(size: int, count: int, kernel: int) -> tuple[tuple[float, float, Starts, int], ...]:
    """Return (low, high, floor((i + u) a) for i < count - 1, floor(u a)) for each interval of u in which none of them changes."""
    a = (size - kernel) / (count - 1)
    cuts = {0.0, 1.0}
    for i in range(count):
        cuts.update(m / a - i for m in range(math.ceil(i * a), math.ceil((i + 1) * a) + 1) if 0 < m / a - i < 1)
    edges = sorted(cuts)
    found = []
    for low, high in zip(edges, edges[1:], strict=False):
        if high - low > 1e-9:
            found.append((low, high, *_floors((low + high) / 2, a, count)))
    return tuple(found)


def _floors(u: float, a: float, count: int) -> tuple[Starts, int]:
    return tuple(math.floor((i + u) * a) for i in range(count - 1)), math.floor(u * a)


@functools.cache
def sequences(size: int, count: int, kernel: int) -> tuple[tuple[Starts, ...], tuple[float, ...]]:
    """List the sequences of starts along one axis.

    Args:
        size: elements of the axis.
        count: windows.
        kernel: elements of a window.

    Returns:
        The sequences, ``count`` starts each, and their probabilities.
    """
    if count == 1:
        return ((size - kernel,),), (1.0,)
    found: dict[Starts, float] = {}
    for low, high, floors, base in _intervals(size, count, kernel):
        key = (*(f - base for f in floors), size - kernel)
        found[key] = found.get(key, 0.0) + high - low
    return tuple(found), tuple(found.values())


@functools.cache
def boundaries(size: int, count: int, kernel: int) -> tuple[Boundary, ...]:
    """List the pairs of sequences whose windows fp32 rounding may mix.

    Args:
        size: elements of the axis.
        count: windows.
        kernel: elements of a window.

    Returns:
        The boundaries between intervals of u, and those at 0 and 1. Empty where all windows have fixed starts.
    """
    if count < 3 or size == kernel:
        return ()
    numbers = {starts: k for k, starts in enumerate(sequences(size, count, kernel)[0])}
    a = (size - kernel) / (count - 1)
    # u is in [0, 1), but i + u may be rounded up to i + 1, and i a down from a whole number.
    before, after = (0.0, 0.0, *_floors(-1e-9, a, count)), (1.0, 1.0, *_floors(1.0 + 1e-9, a, count))
    parts = [before, *_intervals(size, count, kernel), after]
    found = []
    for (_, _, below, base), (_, _, above, next_base) in zip(parts, parts[1:], strict=False):
        changed = [i for i, (f, g) in enumerate(zip(below, above, strict=True)) if f != g]
        if not changed:
            continue
        ends = [(*(f - b for f in floors), size - kernel) for floors, b in ((below, base), (above, next_base))]
        nearest = next(numbers[e] for e in ends if e in numbers)
        share = 2 * ROUNDINGS * HALF_ULP * (changed[-1] + 1)
        for b in sorted({max(0, base), next_base}):
            low, high = ((*(f - b for f in floors), size - kernel) for floors in (below, above))
            found.append(Boundary(low, high, nearest, share))
            share = 0.0  # counted once for this value of u, whatever floor(u a) becomes
    return tuple(found)


def _along(x: torch.Tensor, starts: torch.Tensor, kernel: int) -> torch.Tensor:
    """Maxima of the windows along the last axis: (..., size) -> (sequences, ..., count)."""
    out = x[..., starts]
    for k in range(1, kernel):
        out = torch.maximum(out, x[..., starts + k])
    return out.movedim(-2, 0)


class _Planes:
    """Explains results of planes by sequences of starts.

    Args:
        size: (height, width) of a plane.
        count: (rows, columns) of windows.
        kernel: (height, width) of a window.
        device: of the tensors.
    """

    def __init__(self, size: tuple[int, int], count: tuple[int, int], kernel: tuple[int, int], device: torch.device) -> None:
        self.kernel, self._device = kernel, device
        axes = list(zip(size, count, kernel, strict=True))
        (self.rows, self.row_shares), (self.columns, self.column_shares) = (sequences(*axis) for axis in axes)
        self._boundaries = [boundaries(*axis) for axis in axes]
        self._rows, self._columns = (torch.tensor(s, device=device) for s in (self.rows, self.columns))

    def usual(self, planes: int) -> int:
        """Return how many of so many planes may have rows or columns of a mixture."""
        from scipy import special  # takes 0.2 s, and one task has windows

        share = min(1.0, sum(b.share for axis in self._boundaries for b in axis))
        # bdtrc(k, n, p) is the probability of more than k successes in n trials.
        return next(k for k in range(planes + 1) if special.bdtrc(k, planes, share) <= RARE)

    def exact(self, x: torch.Tensor, y: torch.Tensor, at: torch.Tensor | None) -> list[int]:
        """Find the pairs of sequences that give a plane's result: several where windows beside each other share a maximum.

        Args:
            x: (height, width), the plane.
            y: (rows, columns), the maxima.
            at: (rows, columns), positions of the maxima in the flat plane; ``None`` where they were not asked for.

        Returns:
            For each pair, row sequence times number of column sequences plus column sequence; none if none gives ``y`` (and
            ``at``).
        """
        tall = _along(x.mT, self._rows, self.kernel[0]).mT  # (row sequences, rows of windows, width)
        whole = _along(tall, self._columns, self.kernel[1])  # (column sequences, row sequences, ...)
        hits = (whole == y).flatten(2).all(-1).mT.flatten().nonzero().flatten().tolist()
        if at is None:
            return list(hits)
        left = [(self._rows[pair // len(self.columns)], self._columns[pair % len(self.columns)]) for pair in hits]
        return [pair for pair, axes in zip(hits, left, strict=True) if bool(self._holds(at, x.shape[-1], *axes).all())]

    def likely(self, pairs: Sequence[int], draw: torch.Generator) -> int:
        """Draw one of the pairs that give the same result, each with its own probability.

        The pairs of all planes then come as often as they should if the kernel's do. The first pair of each plane would come too
        often: an honest kernel was refused in two of five gradings.

        Args:
            pairs: from ``exact``.
            draw: source of the draw.

        Returns:
            A pair; -1 if there is none.
        """
        if len(pairs) < 2:
            return pairs[0] if pairs else -1
        rows, columns = self.row_shares, self.column_shares
        shares = torch.tensor([rows[p // len(columns)] * columns[p % len(columns)] for p in pairs], dtype=torch.float64)
        return pairs[int(torch.multinomial(shares, 1, generator=draw))]

    def _holds(self, at: torch.Tensor, width: int, top: torch.Tensor, left: torch.Tensor) -> torch.Tensor:
        """Whether positions lie in the windows that start at rows ``top`` and columns ``left``; (rows, columns)."""
        i, j, top, left = at // width, at % width, top[:, None], left[None, :]
        return (i >= top) & (i < top + self.kernel[0]) & (j >= left) & (j < left + self.kernel[1])

    def mixed(self, x: torch.Tensor, y: torch.Tensor, at: torch.Tensor | None) -> int:
        """Find a pair of sequences of which at least one is a mixture; arguments as ``exact``, -1 if there is none."""
        exact = [[Boundary(s, s, k, 0.0) for k, s in enumerate(axis)] for axis in (self.rows, self.columns)]
        row_choices, column_choices = ([*e, *b] for e, b in zip(exact, self._boundaries, strict=True))
        for row in row_choices:
            tops = torch.tensor((row.low, row.high), device=self._device)
            talls = _along(x.mT, tops, self.kernel[0]).mT  # (2, rows of windows, width)
            for column in column_choices:
                if row.low == row.high and column.low == column.high:
                    continue
                lefts = torch.tensor((column.low, column.high), device=self._device)
                fits = (_along(talls, lefts, self.kernel[1]) == y).movedim(0, 1)  # (row side, column side, rows, columns)
                if at is not None:
                    fits &= torch.stack([torch.stack([self._holds(at, x.shape[-1], t, c) for c in lefts]) for t in tops])
                if _consistent(fits):
                    return row.nearest * len(self.columns) + column.nearest
        return -1


def _consistent(fits: torch.Tensor) -> bool:
    """Whether every row can take one side and every column one side so that all elements fit.

    Rows that fit with both sides leave the choice to the others.

    Args:
        fits: bool (row side, column side, rows, columns): whether an element is the maximum of that window.

    Returns:
        Whether there is such a choice.
    """
    free = fits.any(1).all(-1)  # (row side, rows): some side of each column fits
    if not bool(free.any(0).all()):
        return False
    sure = torch.where(free.all(0), 2, free.to(torch.uint8).argmax(0))[None, :, None]
    by_row = torch.where(sure == 2, fits.any(0), torch.where(sure == 1, fits[1], fits[0]))  # (column side, rows, columns)
    column = by_row.all(1)  # (column side, columns)
    if not bool(column.any(0).all()):
        return False
    chosen = torch.where(column[0], fits[:, 0], fits[:, 1])  # (row side, rows, columns)
    return bool(chosen.all(-1).any(0).all())


def rule(
    truth: Windows, args: Mapping[str, Any], answers: Sequence[Answer], *, timed: bool = False,
    earlier: list[Any] | None = None,
) -> Ruling:  # fmt: skip
    """Judge that every plane has the maxima of one pair of sequences, and that the sequences look drawn.

    Args:
        truth: names the input and the kernel size.
        args: of the call.
        answers: results of calls with equal arguments.
        timed: whether the call was timed: then values and positions of the first answer are judged alone.
        earlier: the random numbers that the calls of the grading's other cases seem to have drawn; grows.

    Returns:
        The ruling.
    """
    x = args[truth.tensor].clamp_min(0)
    kernel = args[truth.kernel]
    kernel = (kernel, kernel) if isinstance(kernel, int) else tuple(kernel)
    y = answers[0].outputs[0]
    if not y.numel():
        return PASSED
    planes = x.reshape(-1, *x.shape[-2:])
    size, count = (x.shape[-2], x.shape[-1]), (y.shape[-2], y.shape[-1])
    axes = _Planes(size, count, kernel, planes.device)
    numbers = [] if earlier is None else earlier
    # Other numbers in every case: they would have them in common.
    draw = randomness.generator(0x81 + len(numbers))
    picked = []
    for answer in answers[: 1 if timed else None]:
        found, wrong = _explained(axes, planes, answer, draw)
        if wrong:
            return Ruling(False, wrong)
        picked.append(found)
    shares = [p * q for p in axes.row_shares for q in axes.column_shares]
    if timed or len(shares) == 1:
        return PASSED
    ruling = _drawn(picked, shares)
    if not ruling.passed:
        return ruling
    for found in picked:
        ids = torch.tensor(found)
        numbers.append((
            _numbers(ids // len(axes.columns), axes.row_shares, draw),
            _numbers(ids % len(axes.columns), axes.column_shares, draw),
        ))  # fmt: skip
    wrong = _together(numbers)
    return Ruling(False, f"the windows are not drawn independently: {wrong}") if wrong else PASSED


def _explained(axes: _Planes, planes: torch.Tensor, answer: Answer, draw: torch.Generator) -> tuple[list[int], str]:
    """Find the sequences of each plane; returns their numbers, and what is wrong ("" if nothing is)."""
    mine = answer.outputs[0].to(planes.device).reshape(planes.shape[0], *answer.outputs[0].shape[-2:])
    nothing: list[torch.Tensor | None] = [None] * len(mine)
    at, wrong = nothing, ""
    if len(answer.outputs) > 1:
        positions = answer.outputs[1].to(planes.device).reshape(mine.shape)
        wrong = _misplaced(planes, mine, positions)
        at = nothing if wrong else list(positions)
    found = _found(axes, planes, mine, at, draw)
    if min(found) < 0:
        if at is not nothing and min(_found(axes, planes, mine, nothing, draw)) >= 0:
            return [], "wrong positions: outside of their windows"
        unexplained = sum(not axes.exact(p, o, None) for p, o in zip(planes, mine, strict=True))
        return [], f"wrong values: {unexplained} of {len(found)} planes fit no sequence of windows"
    return found, wrong


def _misplaced(planes: torch.Tensor, maxima: torch.Tensor, positions: torch.Tensor) -> str:
    if bool((positions < 0).any()) or bool((positions >= planes[0].numel()).any()):
        return "wrong positions: outside of the plane"
    if not torch.equal(planes.flatten(1).gather(1, positions.flatten(1)), maxima.flatten(1)):
        return "wrong positions: they do not hold the maxima"
    return ""


def _found(
    axes: _Planes, planes: torch.Tensor, maxima: torch.Tensor, at: Sequence[torch.Tensor | None], draw: torch.Generator
) -> list[int]:  # fmt: skip
    """Return the number of a pair of sequences for each plane, -1 where none gives its maxima (and positions ``at``)."""
    found = [axes.likely(axes.exact(p, o, a), draw) for p, o, a in zip(planes, maxima, at, strict=True)]
    left = [k for k, pair in enumerate(found) if pair < 0]
    if len(left) <= axes.usual(len(found)):
        for k in left:
            found[k] = axes.mixed(planes[k], maxima[k], at[k])
            if found[k] < 0:
                break
    return found


def _numbers(picked: torch.Tensor, shares: Sequence[float], draw: torch.Generator) -> torch.Tensor:
    """For each plane a number by its sequence, uniform over all if the sequences come as often as they should, minus 1/2."""
    share = torch.tensor(shares, dtype=torch.float64)
    below = share.cumsum(0) - share
    return below[picked] + share[picked] * torch.rand(picked.shape, generator=draw, dtype=torch.float64) - 0.5


def _together(calls: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> str:
    """What the numbers of planes, axes and calls have in common. A call has few planes; all calls of a grading tell more."""
    rows, columns = (Line(torch.cat(axis), 1 / 12, 0.5) for axis in zip(*calls, strict=True))
    for line, name in ((rows, "rows"), (columns, "columns")):
        counted = torch.histc(line.values, BINS, -0.5, 0.5)
        usual = line.n / BINS
        if float((counted - usual).square().sum()) / usual > UNEVEN:
            return f"the random numbers of {name} come more often from some parts of [0, 1)"
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
    for first, second, name in ((0, 0, "rows"), (1, 1, "columns"), (0, 1, "axes")):
        if _in_steps([(call[first], call[second]) for call in calls]):
            return f"{name} of planes go together in steps"
    return ""


@functools.cache
def _steps(planes: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the planes to compare, for each pair of different steps and each two first planes.

    Args:
        planes: of a call.

    Returns:
        Planes of the first and of the second line, int64 (comparisons, planes), and where they are meant, fp64.
    """
    t = torch.arange(planes)
    pairs = [(first + step * t, second + other * t) for step in STEPS for other in STEPS if step != other
             for first in range(step + LAG) for second in range(other + LAG)]  # fmt: skip
    one, two = (torch.stack(side) for side in zip(*pairs, strict=True))
    meant = (one < planes) & (two < planes) & (one != two)
    return one.clamp_max(planes - 1), two.clamp_max(planes - 1), meant.double()


def _in_steps(lines: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> bool:
    """Whether the numbers of planes a p + b and of planes c p + d go together, with a and c of ``STEPS``; lines of each call."""
    total, terms = torch.zeros(()), torch.zeros(())
    for x, y in lines:
        one, two, meant = _steps(x.numel())
        total, terms = total + (x[one] * y[two] * meant).sum(1), terms + meant.sum(1)
    return bool((total.abs() > randomness.limit(terms.clamp_min(1.0), 1 / 144, 0.25, total.numel())).any())


def _drawn(picked: Sequence[Sequence[int]], shares: Sequence[float]) -> Ruling:
    """How often each pair of sequences came, and whether calls repeat each other.

    Args:
        picked: numbers of the pairs, for each plane of each call.
        shares: probability of each pair.

    Returns:
        The ruling. A right kernel is refused in about one of 10^9 calls, of few planes in one of 10^7.
    """
    from scipy import special

    # bdtrc(k, n, p) is the probability of more than k successes in n trials.
    for found in picked:
        n, counts = len(found), [found.count(k) for k in range(len(shares))]
        chi = sum((count - n * p) ** 2 / (n * p) for count, p in zip(counts, shares, strict=True))
        least = min(special.bdtrc(count - 1, n, p) for count, p in zip(counts, shares, strict=True) if count)
        if chi > _most_uneven(tuple(shares), n) or least < RARE / len(shares):
            return Ruling(False, "the windows are not drawn as they should be: some come far too often")
    if len(picked) > 1:
        n = len(picked[0])
        same = sum(a == b for a, b in zip(picked[0], picked[1], strict=True))
        if same and special.bdtrc(same - 1, n, sum(s * s for s in shares)) < RARE:
            return Ruling(False, "two calls drew the same windows too often")
    return PASSED


@functools.cache
def _most_uneven(shares: tuple[float, ...], planes: int) -> float:
    """Return Pearson's chi-square of so many planes that fair windows exceed with probability ``RARE``, approximately.

    Its mean is the number of pairs less one. Its variance is not quite that of the chi-square distribution where planes are few
    (J. B. S. Haldane, Biometrika 29, 1937), so the quantile is that of a gamma distribution with the same mean and variance.
    A normal distribution would be wrong: with two degrees of freedom one in 4,600 exceeds seven standard deviations.

    Args:
        shares: probability of each pair, at least two.
        planes: how many were drawn.
    """
    from scipy import special

    mean = len(shares) - 1
    variance = 2 * mean + (sum(1 / p for p in shares) - len(shares) ** 2 - 2 * mean) / planes
    if variance < 1e-6:  # of one plane and equal shares it has one value
        return math.inf
    return float(variance / (2 * mean) * special.chdtri(2 * mean * mean / variance, RARE))
