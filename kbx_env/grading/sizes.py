"""The sizes that are timed: the published ones, or held-out ones that training never times."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from kbx_env.errors import DeclarationError
from kbx_env.grading import compulsory_work
from kbx_env.spec.task import Case, Distribution, Ints, Literal, Places, Scaled, Shuffled, Signed, Task, shape_of

SHARES = (0.75, 0.875)
"""Held-out size as a share of the published one; the first that keeps the work within the bounds is used."""
LEAST, MOST = 0.4, 1.3
"""Bounds on the work (bytes, operations) of a held-out case, as a share of its published counterpart's."""
LONG = 96
"""Axes of at least this size are resized; shorter ones (channels of a picture, heads, windows) only in square
matrices."""
SHORT = 8
"""Smaller numbers are not resized: they cannot be told from numbers that are no sizes."""
ROUND = 1000
"""From this size on half of the tasks get decimal sizes, which no block size divides (one does divide 3/4 of a power of
two)."""
ARGS = ("normalized_shape", "output_size", "size", "steps", "target_sizes")
"""Arguments that are sizes."""


def timed(task: Task, sizes: str = "published") -> tuple[Case, ...]:
    """Return the cases that are timed (CUDA) or estimated (CPU).

    Args:
        task: the task.
        sizes: one of ``SIZES``.

    Returns:
        The cases.
    """
    return held_out(task) if sizes == "held-out" else task.timed


def at(task: Task, index: int) -> Case:
    """Return a timed case by its index among the published and then the held-out ones; processes refer to cases by
    it.
    """
    return task.timed[index] if index < len(task.timed) else held_out(task)[index - len(task.timed)]


@functools.cache
def held_out(task: Task) -> tuple[Case, ...]:
    """Return a held-out counterpart of every published timed case: declared by the task, or else derived by ``SHARES``.

    Args:
        task: the task.

    Returns:
        The cases, in the order of ``task.timed``.

    Raises:
        DeclarationError: the dependences between the task's axes cannot be derived; it must declare ``held_timed``.
    """
    found = task.held_timed or tuple(_counterpart(task, case) for case in task.timed)
    if len(found) != len(task.timed):
        raise DeclarationError(f"{task.id}: {len(found)} held-out timed cases; {len(task.timed)}, as many as published")
    return found


def work(task: Task, case: Case) -> tuple[float, float]:
    """Return bytes (declared, or else of the inputs) and operations of a case: for comparing cases, no lower bounds."""
    declared = compulsory_work.declared_bytes(task, case)
    moved = float(compulsory_work.input_bytes(task, case)) if declared is None else declared
    return moved, float(compulsory_work.operations(task, case))


def similar(task: Task, published: Case, other: Case) -> bool:
    """Return whether the work of ``other`` is within ``LEAST`` to ``MOST`` times that of its published counterpart."""
    pairs = zip(work(task, other), work(task, published), strict=True)
    return all(LEAST * reference <= found <= MOST * reference for found, reference in pairs)


def resized(task: Task, case: Case, to: Mapping[int, int]) -> Case:
    """Return a case with other sizes.

    Equal sizes are changed together wherever they appear: in axes, in arguments that are sizes (``ARGS``), in bounds of
    indices.

    Args:
        task: the task.
        case: the case.
        to: size -> new size; others stay.

    Returns:
        The case with the new sizes.

    Raises:
        DeclarationError: a number of the case may depend on a size without being equal to it. (In arguments of ``ARGS``
            a multiple or a fraction of a size is changed in proportion.)
    """
    sizes = _Resizing(task, case, to)
    for name, value in case.args.items():
        if name not in ARGS and not isinstance(value, bool | float) and set(_integers(value)) & set(to):
            raise sizes.refuse(f"{name}={value}, which may be a size")
    return replace(
        case, axes={k: sizes.value(v, k) for k, v in case.axes.items()},
        draw=sizes.distribution(case.draw), draws={k: sizes.distribution(v) for k, v in case.draws.items()},
        args={k: sizes.value(v, k, True) if k in ARGS else v for k, v in case.args.items()},
    )  # fmt: skip


class _Resizing:
    """Changes the sizes in values of one case; arguments as for ``resized``."""

    def __init__(self, task: Task, case: Case, to: Mapping[int, int]) -> None:
        self.task, self.case, self.to = task, case, to
        self.unchanged = _sizes(task, case) - set(to)

    def refuse(self, what: str) -> DeclarationError:
        """Return the exception for a part of the case that cannot be resized."""
        where = f"{self.task.id}: case {self.case.label()!r}"
        return DeclarationError(f"{where}: cannot resize {what}; declare held_timed=")

    def value(self, value: Any, what: str, ratios: bool = False) -> Any:
        """Return a size, or a sequence of sizes, after the change.

        Args:
            value: the size; values that are no sizes stay as they are.
            what: its name, for the error message.
            ratios: change multiples and fractions of a size in proportion.

        Returns:
            A value of the same type.
        """
        if isinstance(value, tuple | list):
            return type(value)(self.value(v, what, ratios) for v in value)
        if not isinstance(value, int) or isinstance(value, bool) or value < SHORT or value in self.unchanged:
            return value
        if value in self.to:
            return self.to[value]
        for old, new in sorted(self.to.items(), reverse=True):
            if ratios and (value % old == 0 or old % value == 0) and value * new % old == 0:
                return value * new // old
        raise self.refuse(f"{what}={value}")

    def distribution(self, declared: Distribution) -> Distribution:
        """Return a distribution whose bound of indices, if it has one, is changed."""
        if isinstance(declared, Scaled):
            return replace(declared, matrices=self.distribution(declared.matrices))
        if isinstance(declared, Literal | Shuffled | Signed):
            raise self.refuse("listed values")
        if isinstance(declared, Places):
            raise self.refuse("positions along an axis")
        if isinstance(declared, Ints) and declared.low == 0 and isinstance(declared.high, int):
            return replace(declared, high=self.to.get(declared.high, declared.high))
        return declared


def _counterpart(task: Task, case: Case) -> Case:
    """Derive a held-out counterpart of a published case; raises ``DeclarationError`` if there is none."""
    sizes, square = _sizes(task, case), _square(task, case)
    more = {s for s in sizes if s >= LONG} or ({s for s in sizes if s >= SHORT} if not square else set())
    # Square matrices first: they stay square. If the work becomes too small, the shortest axes keep their size.
    wanted = [*sorted(square, reverse=True), *sorted(more - square, reverse=True)]
    for share in SHARES:
        for count in range(len(wanted), 0, -1):
            other = resized(task, case, {s: _part(task, s, share) for s in wanted[:count]})
            if similar(task, case, other):
                return other
    raise DeclarationError(f"{task.id}: case {case.label()!r}: no axis can be resized; declare held_timed=")


def _part(task: Task, size: int, share: float) -> int:
    """Return a share of a size; in half of the tasks, chosen by name, large sizes are rounded up to two decimal
    digits.
    """
    part = round(size * share)
    if size < ROUND or zlib.crc32(task.id.encode()) % 2:
        return part
    unit = 10 ** (len(str(part)) - 2)
    return -(-part // unit) * unit


def _shapes(task: Task, case: Case) -> Iterator[tuple[int, ...]]:
    """Yield the shapes of the tensors that a case passes."""
    for name, t in task.takes.items():
        if name not in case.args and (not t.optional or name in case.given):
            yield shape_of(t, case.axes)


def _sizes(task: Task, case: Case) -> set[int]:
    """Return the sizes of the tensors' axes; of a task without tensors, the sizes in its arguments."""
    if task.takes:
        return {size for shape in _shapes(task, case) for size in shape}
    return {size for name in ARGS for size in _integers(case.args.get(name))}


def _square(task: Task, case: Case) -> set[int]:
    """Return the sizes of square matrices and pictures."""
    return {s[-1] for s in _shapes(task, case) if len(s) > 1 and s[-1] == s[-2] and s[-1] >= SHORT}


def _integers(value: Any) -> list[int]:
    """Return all integers in a value, at any depth."""
    if isinstance(value, tuple | list):
        return [n for v in value for n in _integers(v)]
    return [value] if isinstance(value, int) and not isinstance(value, bool) else []
