"""Derives cases from a task's declared bounds: random shapes, arguments and memory layouts, without torch.

A task declares families of cases in ``varied``. A family is a function of a ``Pick``, the source of random choices; it
returns one case within the bounds of the contract. Every grading draws one case of each family from its secret, so that
no list of shapes or arguments can be learned (``grading/derived_cases.py``).
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from kbx_env.errors import DeclarationError
from kbx_env.spec.task import (
    Case,
    Constant,
    Distinct,
    Distribution,
    Eye,
    Linspace,
    Literal,
    Places,
    Scaled,
    Shuffled,
    Signed,
)

Family = Callable[["Pick"], Case]
"""Draws one case of a task."""
FIXED = (Constant, Distinct, Eye, Linspace, Literal, Places, Shuffled, Signed)
"""Distributions that belong to the shape of the case that declares them; cases with them are not reshaped."""
LARGE, LARGE_SPAN = 1 << 16, 4
"""Elements from which on a tensor is large, and how many times its own elements it spans at most, gaps included."""
STEPS = (1, 1, 2, 3)
"""Distances of neighbours along an axis, in elements of a dense tensor: half of the axes have gaps."""
OFFSETS = (0, 0, 1, 5, 16)
"""Elements of the buffer before the tensor."""
PADS = (0, 0, 1, 3)
"""Elements of the buffer behind each line of the innermost axis, as in a slice ``x[:, :-1]``."""


def _fixed(draw: Distribution | None) -> bool:
    """Return whether a distribution belongs to the shape of the case that declares it."""
    return _fixed(draw.matrices) if isinstance(draw, Scaled) else isinstance(draw, FIXED)


class Pick:
    """The random choices of one derived case; equal seeds give equal choices.

    Args:
        seed: of the choices.
        cases: declared cases of the task that ``reshapable`` has found, from which ``like`` takes distributions and arguments.
    """

    def __init__(self, seed: int, cases: Sequence[Case] = ()) -> None:
        self._random = random.Random(seed)
        self._cases = cases

    def whole(self, low: int, high: int) -> int:
        """Return an integer in [low, high]."""
        return self._random.randint(low, high)

    def real(self, low: float, high: float, digits: int = 3) -> float:
        """Return a number in [low, high] with few decimal digits, so that labels stay short."""
        return round(self._random.uniform(low, high), digits)

    def among(self, *values: Any) -> Any:
        """Return one of the values."""
        return self._random.choice(values)

    def chance(self, share: float = 0.5) -> bool:
        """Return True in a share of the draws."""
        return self._random.random() < share

    def shuffled(self, values: Sequence[Any]) -> tuple[Any, ...]:
        """Return the values in another order."""
        return tuple(self._random.sample(list(values), len(values)))

    def shape(self, low: int, high: int, elements: int = 1500) -> tuple[int, ...]:
        """Return sizes of ``low`` to ``high`` axes with at most about ``elements`` elements; most are larger than 1."""
        rank = self.whole(low, high)
        sizes = []
        left = elements
        for k in range(rank):
            typical = left ** (1 / (rank - k))
            size = self.whole(2, max(2, round(1.5 * typical))) if self.chance(0.9) else 1
            size = min(size, max(1, left))
            sizes.append(size)
            left //= size
        return self.shuffled(sizes)

    def batch(self, least: int = 9, most: int = 16) -> tuple[int, ...]:
        """Return two or three batch axes of about ``least`` to ``most`` entries together, so that not one block holds them all."""
        first = self.whole(2, 4)
        return self.shuffled((first, -(-self.whole(least, most) // first), *self.among((), (1,))))

    def slab(self, low: int, high: int, length: int, at: int | None = None) -> tuple[tuple[int, ...], int]:
        """Return a shape with one long axis, which needs several blocks of any kernel, and few other elements.

        Args:
            low: least number of axes.
            high: largest number of axes.
            length: about the size of the long axis.
            at: the long axis; ``None`` for any.

        Returns:
            The shape, and the number of the long axis.
        """
        rest = list(self.shape(low - 1, high - 1, 3))
        if at is None:  # kernels take the last axis for the columns of their tiles
            at = len(rest) if self.chance(0.4) else self.whole(0, len(rest))
        at %= len(rest) + 1
        rest.insert(at, self.whole(length, length + length // 8))
        return tuple(rest), at

    def broadcast(self, shape: Sequence[int], least: int = 0) -> tuple[int, ...]:
        """Return a shape that broadcasts to ``shape``: some axes have length 1, leading ones beyond ``least`` may be missing."""
        part = tuple(1 if self.chance(0.35) else n for n in shape)
        return part[self.whole(0, max(0, len(part) - least)) if self.chance(0.4) else 0 :]

    def both_ways(
        self, low: int, high: int, elements: int = 1500, parts: int = 2, longest: int = 0
    ) -> list[tuple[int, ...]]:  # fmt: skip
        """Return shapes that broadcast against each other; each has an axis of length 1 along which another is longer.

        Args:
            low: least number of axes of the common shape, at least ``parts``.
            high: largest number of axes of the common shape.
            elements: about the number of elements of the common shape.
            parts: number of shapes.
            longest: about the length of one long axis beside short ones; 0 for none.

        Returns:
            The shapes.
        """
        if longest:
            # As many axes as possible, so that each shape keeps four where four are allowed; few elements.
            wide = [self.whole(longest, longest + longest // 8), *(self.whole(2, 3) for _ in range(parts - 1))]
            rank = self.whole(max(low, min(high, 5)), high)
            shape = self.shuffled([*wide, *(1 for _ in range(rank - len(wide)))])
        else:
            shape = tuple(max(2, n) for n in self.shape(low, high, elements))
        axes = self.shuffled([k for k, n in enumerate(shape) if n > 1])
        short: list[set[int]] = [{axes[k]} for k in range(parts)]
        for axis in axes[parts:]:
            if self.chance(0.4):
                short[self.whole(0, parts - 1)].add(axis)
        found = []
        for ones in short:
            part = tuple(1 if k in ones else n for k, n in enumerate(shape))
            lead = next((k for k, n in enumerate(part) if n != 1), len(part))
            lead = max(0, min(lead, len(part) - 4)) if longest else lead
            found.append(part[self.whole(0, lead) :])
        return found

    def axis(self, rank: int) -> int:
        """Return an axis, counted from the front or the back."""
        return self.whole(-rank, rank - 1)

    def axes(self, rank: int, least: int = 1, most: int | None = None) -> tuple[int, ...]:
        """Return distinct axes, each counted from the front or the back; several are never in ascending order."""
        count = self.whole(least, rank if most is None else min(most, rank))
        axes = tuple(a - rank if self.chance() else a for a in self.shuffled(range(rank))[:count])
        return axes if count < 2 or list(axes) != sorted(axes) else axes[::-1]

    def like(
        self, axes: Mapping[str, Any] | None = None, args: Mapping[str, Any] | None = None, *,
        where: Callable[[Case], bool] | None = None, full: bool = False, **fields: Any,
    ) -> Case:  # fmt: skip
        """Return a declared case with other axes and arguments; layouts are drawn anew, ``out`` only if asked for.

        Args:
            axes: sizes that take the place of the declared ones, or are added.
            args: arguments that take the place of the declared ones, or are added.
            where: condition on the declared case.
            full: use only cases that pass the largest number of optional tensors.
            **fields: further fields of the case.

        Returns:
            The case.

        Raises:
            DeclarationError: no declared case qualifies.
        """
        fit = [c for c in self._cases if where is None or where(c)]
        if not fit:
            raise DeclarationError("no declared case can be reshaped")
        if full:
            most = max(len(c.given) for c in fit)
            fit = [c for c in fit if len(c.given) == most]
        base = self.among(*fit)
        return replace(
            base, axes={**base.axes, **(axes or {})}, args={**base.args, **(args or {})},
            **({"layouts": {}, "held": False, "out": False} | fields),
        )  # fmt: skip

    def layout(self, shape: Sequence[int]) -> str | None:
        """Return a memory layout of a tensor in which it is not contiguous, in the notation of ``Case.layouts``.

        The axes lie in memory in any order, with gaps along some of them, from any element of the buffer on: few gaps in a large
        tensor, which all processes of a grading copy. Declared cases have contiguous tensors, so that derived ones need none.

        Args:
            shape: of the tensor.

        Returns:
            The layout; ``None`` for a tensor without axes. Tensors of one element and empty ones are contiguous in any.
        """
        if not len(shape):
            return None
        while True:
            found = self._layout(len(shape))
            if math.prod(shape) >= 2 and contiguous(shape, *found):
                continue
            if math.prod(shape) < LARGE or _span(shape, found) <= LARGE_SPAN * math.prod(shape):
                return layout(*found)

    def _layout(self, rank: int) -> tuple[Sequence[int], Sequence[int], int, int]:
        """Return order, steps, offset and pad of a layout that fits most shapes."""
        if rank > 1 and self.chance(0.2):  # a slice of longer lines, such as x[..., :-1]: nearly contiguous
            return range(rank), [1] * rank, self.among(*OFFSETS), self.among(1, 1, 2, 5)
        order = self.shuffled(range(rank))
        if rank > 1 and order == tuple(range(rank)):
            order = (*order[1:], order[0])
        steps = [self.among(*STEPS) for _ in range(rank)] if rank > 1 else [self.among(2, 3)]
        return order, steps, self.among(*OFFSETS), self.among(*PADS)

    def adjacent(self, rank: int, axis: int) -> str:
        """Return a layout in which neighbours along an axis are adjacent in memory; the others lie in any order, with gaps.

        Args:
            rank: axes of the tensor.
            axis: the axis, from the front.

        Returns:
            The layout.
        """
        order = (*self.shuffled([k for k in range(rank) if k != axis]), axis)
        steps = [1 if k == axis else self.among(*STEPS) for k in range(rank)]
        return layout(order, steps, self.among(*OFFSETS), self.among(*PADS))


def flat(families: Iterable[Family | tuple[Family, ...]]) -> tuple[Family, ...]:
    """Return the families of a list in which tuples stand for several of them."""
    return tuple(f for each in families for f in (each if isinstance(each, tuple) else (each,)))


def layout(order: Sequence[int], steps: Sequence[int], offset: int = 0, pad: int = 0) -> str:
    """Return the notation of a layout for ``Case.layouts``.

    Args:
        order: the axes, the one with the largest stride first.
        steps: by axis, distance of neighbours in elements of a tensor without gaps; 0 where all of them are one element
            (an expanded tensor).
        offset: elements of the buffer before the tensor.
        pad: elements of the buffer behind each line of the innermost axis.

    Returns:
        ``order 2 0 1 steps 1 3 1 pad 1 offset 5``, without a pad of 0.
    """
    behind = f" pad {pad}" if pad else ""
    return f"order {' '.join(map(str, order))} steps {' '.join(map(str, steps))}{behind} offset {offset}"


def contiguous(shape: Sequence[int], order: Sequence[int], steps: Sequence[int], offset: int = 0, pad: int = 0) -> bool:
    """Return whether a tensor with a layout is contiguous, as torch says; arguments as for ``layout``."""
    strides, dense = _strides(shape, order, steps, pad), 1
    for axis in reversed(range(len(shape))):
        if shape[axis] != 1 and strides[axis] != dense:
            return False
        dense *= shape[axis]
    return True


def _strides(shape: Sequence[int], order: Sequence[int], steps: Sequence[int], pad: int) -> dict[int, int]:
    """Return the strides of a tensor with a layout, in elements by axis; arguments as for ``layout``."""
    strides, inner = {}, 1
    for axis in reversed(order):
        strides[axis] = inner * steps[axis]
        inner *= shape[axis] * steps[axis] if steps[axis] else 1
        inner += pad if axis == order[-1] else 0
    return strides


def _span(shape: Sequence[int], found: tuple[Sequence[int], Sequence[int], int, int]) -> int:
    """Return the elements from the first one of a tensor to its last one, gaps included; ``found`` is its layout."""
    order, steps, _, pad = found
    strides = _strides(shape, order, steps, pad)
    return 1 + sum((n - 1) * strides[axis] for axis, n in enumerate(shape))


def parsed(text: str) -> tuple[tuple[int, ...], tuple[int, ...], int, int] | None:
    """Return order, steps, offset and pad of a layout in the notation of ``layout``; ``None`` for named layouts."""
    found = re.fullmatch(r"order ([\d ]+) steps ([\d ]+?)(?: pad (\d+))? offset (\d+)", text)
    if found is None:
        return None
    order, steps = (tuple(map(int, numbers.split())) for numbers in found.group(1, 2))
    return order, steps, int(found[4]), int(found[3] or 0)


def reshapable(cases: Iterable[Case]) -> tuple[Case, ...]:
    """Return the cases whose distributions fit other shapes too, and which have elements."""

    def fits(case: Case) -> bool:
        sizes = [n for v in case.axes.values() for n in (v if isinstance(v, tuple) else (v,))]
        return math.prod(sizes) > 0 and not any(_fixed(d) for d in (case.draw, *case.draws.values()))

    return tuple(case for case in cases if fits(case))
