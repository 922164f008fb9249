"""Values that no call has seen: windows into a few secret draws laid end to end.

If the elements of a tensor are drawn independently, every window into the draws is a valid draw too. For a batch of
matrices every window of whole matrices is; and a matrix keeps its kind when its rows and columns are rolled by the same
amount. Two draws thus give a new input for each of thousands of calls, by copies on the device that the grader repeats
on the host. Tensors whose distribution allows neither (a permutation, a single triangular matrix) change between a few
draws.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kbx_env.device.layout import flat
from kbx_env.grading import gpu_turns, inputs
from kbx_env.spec import input_distributions as dists
from kbx_env.spec.task import Case, Task

Window = dict[str, tuple[int, int, int]]
"""By tensor: first element of the window, rows and columns by which its matrices are rolled."""

DRAWS = 2
"""Draws of a tensor."""
MAX_DRAWS = 8
"""Draws of a tensor that can only change between whole draws, if they are small."""
SMALL_BYTES = 64 << 20
"""A draw of all inputs up to this size is small."""


ALIGNED_ELEMENTS = 64
"""A moved tensor keeps its offset modulo this many elements, and with it its alignment."""


def bytes_of_draws(total: int) -> int:
    """Return the largest number of bytes of all draws, for inputs of ``total`` bytes."""
    return total * (MAX_DRAWS if total <= SMALL_BYTES else DRAWS)


_ELEMENTWISE = (
    dists.Normal, dists.Outlier, dists.Uniform, dists.HalfNormal, dists.Ints, dists.Bernoulli, dists.Choice,
)  # fmt: skip
"""Distributions with independent elements: windows may start anywhere."""
_ROLLS = (dists.SPD, dists.Symmetric, dists.Dominant, dists.Spectrum, dists.Orthogonal)
"""Distributions of matrices that keep their kind when rows and columns are rolled alike."""
_ALIKE = (dists.Constant, dists.Literal, dists.Linspace, dists.Eye)
"""Distributions whose draws are all equal."""


@dataclass(frozen=True)
class _WindowRule:
    """The valid windows into the draws of one tensor."""

    span: int
    """Elements of a window."""
    step: int
    """Windows start at multiples of this many elements."""
    draws: int
    """Draws of the tensor."""
    matrix: tuple[int, int] = (0, 0)
    """Rows and columns of a matrix that may be rolled; zeros if none may."""


@dataclass(frozen=True)
class InputWindows:
    """The draws of one timed case, and which windows into them are valid inputs."""

    draws: tuple[dict[str, Any], ...]
    """Arguments by name. The first draw is complete, later ones hold the tensors that change."""
    rules: Mapping[str, _WindowRule]
    """By tensor; those that never change have none."""

    @classmethod
    def draw(cls, task: Task, case: Case, seeds: Sequence[int], device: str = "cpu") -> InputWindows:
        """Draw the values of a case.

        Args:
            task: the task.
            case: the case.
            seeds: one for each draw, at least ``MAX_DRAWS``.
            device: of the tensors.

        Returns:
            The draws and the rules for windows into them.
        """
        first = inputs.draw(task, case, seeds[0], device)
        written = task.written(case.args)
        total = sum(v.numel() * v.element_size() for v in first.values() if isinstance(v, torch.Tensor))
        whole_draws = MAX_DRAWS if total <= SMALL_BYTES else DRAWS
        rules: dict[str, _WindowRule] = {}
        for name, value in first.items():
            if isinstance(value, torch.Tensor) and value.numel():
                distribution = case.draws.get(name) or task.takes[name].draw or case.draw
                alike = isinstance(distribution, _ALIKE)
                if not alike or name.partition(".")[0] in written:
                    rules[name] = _rule(distribution, value, whole_draws, alike)
        rest = []
        for k in range(1, max((r.draws for r in rules.values()), default=1)):
            gpu_turns.yield_gpu()
            names = [n for n, r in rules.items() if r.draws > k]
            drawn = inputs.draw(task, case, seeds[k], device)
            rest.append({n: drawn[n] for n in names})
        return cls((first, *rest), rules)

    def to(self, device: str) -> InputWindows:
        """Return the same values on a device, in the same layouts; the object itself if they are there.

        Args:
            device: of torch.
        """
        if all(v.device.type == device for d in self.draws for v in d.values() if isinstance(v, torch.Tensor)):
            return self
        return InputWindows(tuple({n: _moved(v, device) for n, v in d.items()} for d in self.draws), self.rules)

    def without_values(self) -> InputWindows:
        """Return the rules alone: windows can be picked, and the memory of the draws is free."""
        return InputWindows((), self.rules)

    def pick(self, rng: random.Random) -> Window:
        """Draw the windows of one call from ``rng``."""
        window: Window = {}
        for name, rule in self.rules.items():
            by = (0, 0)
            if all(rule.matrix):
                down = rng.randrange(rule.matrix[0])
                # Rows and columns roll alike, so that a symmetric matrix stays symmetric; one that is not square need
                # not.
                by = (down, down if rule.matrix[0] == rule.matrix[1] else rng.randrange(rule.matrix[1]))
            window[name] = (rng.randrange(rule.draws * rule.span // rule.step) * rule.step, *by)
        return window

    def args(self, window: Mapping[str, Sequence[int]]) -> dict[str, Any]:
        """Return the arguments of a call.

        Args:
            window: from ``pick``.

        Returns:
            Arguments by name, as ``inputs.draw`` would return them.
        """
        args = dict(self.draws[0])
        for name, (offset, down, right) in window.items():
            rule, value = self.rules[name], self.draws[0][name]
            part = _cut([flat(d[name]) for d in self.draws if name in d], offset, rule.span)
            if down or right:
                part = part.view(-1, *rule.matrix).roll((-down, -right), (1, 2)).reshape(-1)
            args[name] = part.as_strided(value.shape, value.stride())
        return args

    @property
    def turning(self) -> dict[str, list[int]]:
        """The tensors that change and the rows and columns of matrices that may be rolled, as a stopwatch takes
        them.
        """
        return {n: list(r.matrix) for n, r in self.rules.items()}


def _cut(pieces: Sequence[torch.Tensor], start: int, count: int) -> torch.Tensor:
    """Copy consecutive elements of 1-D tensors laid end to end; after the last one the first one follows.

    Args:
        pieces: the tensors.
        start: the first element.
        count: elements.

    Returns:
        (count,), a new tensor.
    """
    total, found = sum(map(len, pieces)), list[torch.Tensor]()
    while count:
        begin = 0
        for piece in pieces:
            if begin <= start < begin + len(piece):
                found.append(piece[start - begin : start - begin + count])
                count, start = count - len(found[-1]), (start + len(found[-1])) % total
                break
            begin += len(piece)
    return torch.cat(found)


def slow_to_draw(task: Task, case: Case) -> bool:
    """Return whether a case has matrices whose draws need factorisations.

    Args:
        task: the task.
        case: the case.
    """
    distributions = (case.draws.get(n) or t.draw or case.draw for n, t in task.takes.items() if n not in case.args)
    return any(isinstance(getattr(d, "matrices", d), inputs.FACTORISED) for d in distributions)


def _moved(value: Any, device: str) -> Any:
    """Return a tensor on a device in the same layout; any other value as it is."""
    if not isinstance(value, torch.Tensor) or not value.numel():
        return value.to(device) if isinstance(value, torch.Tensor) else value
    span, shift = flat(value), value.storage_offset() % ALIGNED_ELEMENTS
    base = torch.empty(shift + len(span), dtype=value.dtype, device=device)
    base[shift:].copy_(span)
    return base.as_strided(value.shape, value.stride(), shift)


def _rule(distribution: dists.Distribution, value: torch.Tensor, whole_draws: int, alike: bool) -> _WindowRule:
    """Return which windows into the draws of a tensor are valid.

    Args:
        distribution: of the tensor.
        value: a draw.
        whole_draws: draws of a tensor that can only change between whole draws.
        alike: whether all draws are equal.

    Returns:
        The rule.
    """
    span = len(flat(value))
    if alike:
        return _WindowRule(span, span, 1)
    dense = span == value.numel()
    if isinstance(distribution, _ELEMENTWISE) and dense:
        return _WindowRule(span, 1, DRAWS)
    if isinstance(distribution, inputs.MATRICES) and value.is_contiguous():
        size = math.prod(value.shape[-2:])
        rolls = isinstance(distribution, _ROLLS)
        single = span == size and not rolls
        matrix = (value.shape[-2], value.shape[-1]) if rolls else (0, 0)
        return _WindowRule(span, size, whole_draws if single else DRAWS, matrix)
    return _WindowRule(span, span, whole_draws)
