"""Values that no call has seen: windows into a few secret draws laid end to end.

Of a tensor whose elements are drawn independently, every window into the draws is as good a draw as they are; of a batch of
matrices every window of whole matrices is, and a matrix stays of its kind when rows and columns are rolled alike. Two draws so
make a new input for each of thousands of calls, by copies on the device that the grader repeats on the host. Laws that allow
neither (a permutation, a single triangular matrix) change between a few draws.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kbx_env.device.layout import flat
from kbx_env.grading import inputs
from kbx_env.spec import input_distributions as dists
from kbx_env.spec.task import Case, Task

Window = dict[str, tuple[int, int, int]]
"""By tensor: first element of the window, rows and columns by which its matrices are rolled."""

DRAWS, MORE = 2, 8
"""Draws in a ring; in one that can only change between whole draws, as long as they are small."""
SMALL = 64 << 20
"""Bytes of a whole draw that counts as small."""


def ring_bytes(total: int) -> int:
    """Bytes of a ring at most, for inputs of so many."""
    return total * (MORE if total <= SMALL else DRAWS)


_ELEMENTWISE = (
    dists.Normal, dists.Outlier, dists.Uniform, dists.HalfNormal, dists.Ints, dists.Bernoulli, dists.Choice,
)  # fmt: skip
_ROLLS = (dists.SPD, dists.Symmetric, dists.Dominant, dists.Spectrum, dists.Orthogonal)
_ALIKE = (dists.Constant, dists.Literal, dists.Linspace, dists.Eye)
"""Every draw is the same."""


@dataclass(frozen=True)
class _Track:
    span: int
    step: int
    """Windows start at multiples of this many elements."""
    draws: int
    matrix: tuple[int, int] = (0, 0)
    """Rows and columns, where matrices may be rolled."""


@dataclass(frozen=True)
class InputWindows:
    """The values of one timed case, and which windows into them are valid inputs."""

    draws: tuple[dict[str, Any], ...]
    """The first is complete, later ones hold the tensors that change."""
    tracks: Mapping[str, _Track]

    @classmethod
    def draw(cls, task: Task, case: Case, seeds: Sequence[int], device: str = "cpu") -> InputWindows:
        """Draw what a case needs on ``device``; ``seeds`` are at least ``MORE``."""
        first = inputs.draw(task, case, seeds[0], device)
        written = task.written(case.args)
        total = sum(v.numel() * v.element_size() for v in first.values() if isinstance(v, torch.Tensor))
        more = MORE if total <= SMALL else DRAWS
        tracks: dict[str, _Track] = {}
        for name, value in first.items():
            if isinstance(value, torch.Tensor) and value.numel():
                law = case.draws.get(name) or task.takes[name].draw or case.draw
                alike = isinstance(law, _ALIKE)
                if not alike or name.partition(".")[0] in written:
                    tracks[name] = _track(law, value, more, alike)
        rest = []
        for k in range(1, max((t.draws for t in tracks.values()), default=1)):
            names = [n for n, t in tracks.items() if t.draws > k]
            whole = inputs.draw(task, case, seeds[k], device)
            rest.append({n: whole[n] for n in names})
        return cls((first, *rest), tracks)

    def pick(self, rng: random.Random) -> Window:
        """The windows of one call."""
        turn: Window = {}
        for name, t in self.tracks.items():
            by = (0, 0)
            if all(t.matrix):
                down = rng.randrange(t.matrix[0])
                # Alike, so that what is symmetric stays so; a matrix that is not square has no diagonal to keep.
                by = (down, down if t.matrix[0] == t.matrix[1] else rng.randrange(t.matrix[1]))
            turn[name] = (rng.randrange(t.draws * t.span // t.step) * t.step, *by)
        return turn

    def args(self, turn: Mapping[str, Sequence[int]]) -> dict[str, Any]:
        """The arguments of a call with these windows, as ``inputs.draw`` would give them."""
        args = dict(self.draws[0])
        for name, (offset, down, right) in turn.items():
            t, value = self.tracks[name], self.draws[0][name]
            ring = torch.cat([flat(d[name]) for d in self.draws if name in d])
            window = ring[offset : offset + t.span]
            window = torch.cat([window, ring[: t.span - len(window)]])
            if down or right:
                window = window.view(-1, *t.matrix).roll((-down, -right), (1, 2)).reshape(-1)
            args[name] = window.as_strided(value.shape, value.stride())
        return args

    @property
    def turning(self) -> dict[str, list[int]]:
        """What a stopwatch is told: the tensors that change, and the sizes of matrices that it may roll."""
        return {n: list(t.matrix) for n, t in self.tracks.items()}


def _track(law: dists.Distribution, value: torch.Tensor, more: int, alike: bool) -> _Track:
    span = len(flat(value))
    if alike:
        return _Track(span, span, 1)
    dense = span == value.numel()
    if isinstance(law, _ELEMENTWISE) and dense:
        return _Track(span, 1, DRAWS)
    if isinstance(law, inputs.MATRICES) and value.is_contiguous():
        size = math.prod(value.shape[-2:])
        rolls = isinstance(law, _ROLLS)
        few = span == size and not rolls
        return _Track(span, size, more if few else DRAWS, (value.shape[-2], value.shape[-1]) if rolls else (0, 0))
    return _Track(span, span, more)
