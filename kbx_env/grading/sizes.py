"""Which sizes are timed: the published ones, or held-out ones that no training ever times."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from kbx_env.errors import DeclarationError
from kbx_env.grading import compulsory_work
from kbx_env.options import SIZES as SIZES
from kbx_env.spec.task import Case, Distribution, Ints, Literal, Places, Shuffled, Signed, Task, shape_of

SHARES = (0.75, 0.875)
"""Of a published axis; the first that keeps the work within the bounds."""
LEAST, MOST = 0.4, 1.3
"""Bounds on the work (bytes, operations) of a held-out case, as a share of its published counterpart's."""
LONG = 96
"""From this on an axis is resized; shorter ones (channels of a picture, heads, windows) only where their matrix is square."""
SHORT = 8
"""Nothing below this is resized, nor told from a number that means no size."""
ROUND = 1000
"""From this on half of the tasks have decimal sizes: no block divides them, as it does three quarters of a power of two."""
ARGS = ("normalized_shape", "output_size", "size", "steps", "target_sizes")
"""Arguments that say sizes."""


def timed(task: Task, sizes: str = "published") -> tuple[Case, ...]:
    """The cases that are timed (CUDA) or estimated (CPU)."""
    return held_out(task) if sizes == "held-out" else task.timed


def at(task: Task, place: int) -> Case:
    """A timed case by its place among the published and then the held-out ones: its name between processes."""
    return task.timed[place] if place < len(task.timed) else held_out(task)[place - len(task.timed)]


@functools.cache
def held_out(task: Task) -> tuple[Case, ...]:
    """A held-out counterpart of every published timed case: as the task declares them, else by ``SHARES`` of its axes.

    Raises:
        DeclarationError: there is no telling how the task's axes depend on each other; it must declare ``held_timed``.
    """
    found = task.held_timed or tuple(_counterpart(task, case) for case in task.timed)
    if len(found) != len(task.timed):
        raise DeclarationError(f"{task.id}: {len(found)} held-out timed cases; {len(task.timed)}, as many as published")
    return found


def work(task: Task, case: Case) -> tuple[float, float]:
    """Bytes (of the inputs, or as declared) and operations of a case: to compare cases, no lower bounds."""
    declared = compulsory_work.declared_bytes(task, case)
    moved = float(compulsory_work.input_bytes(task, case)) if declared is None else declared
    return moved, float(compulsory_work.operations(task, case))


def similar(task: Task, published: Case, other: Case) -> bool:
    """Whether two cases cost about the same."""
    pairs = zip(work(task, other), work(task, published), strict=True)
    return all(LEAST * theirs <= ours <= MOST * theirs for ours, theirs in pairs)


def resized(task: Task, case: Case, to: Mapping[int, int]) -> Case:
    """The case with other sizes: equal sizes are tied, wherever they stand (axes, arguments that say sizes, bounds of indices).

    Args:
        task: the task.
        case: the case.
        to: size -> new size; others stay.

    Raises:
        DeclarationError: a number of the case may depend on a size, and not by being equal to it (arguments: a multiple or a part).
    """

    def refuse(what: str) -> DeclarationError:
        return DeclarationError(f"{task.id}: case {case.label()!r}: cannot resize {what}; declare held_timed=")

    def tied(value: Any, what: str, ratios: bool = False) -> Any:
        if isinstance(value, tuple | list):
            return type(value)(tied(v, what, ratios) for v in value)
        if not isinstance(value, int) or isinstance(value, bool) or value < SHORT or value in free:
            return value
        if value in to:
            return to[value]
        for old, new in sorted(to.items(), reverse=True):
            if ratios and (value % old == 0 or old % value == 0) and value * new % old == 0:
                return value * new // old
        raise refuse(f"{what}={value}")

    def law(given: Distribution) -> Distribution:
        if isinstance(given, Literal | Shuffled | Signed):
            raise refuse("listed values")
        if isinstance(given, Places):
            raise refuse("positions along an axis")
        bound = isinstance(given, Ints) and given.low == 0 and isinstance(given.high, int)
        return replace(given, high=to.get(given.high, given.high)) if bound else given  # type: ignore[call-arg, attr-defined]

    free = _sizes(task, case) - set(to)
    for name, value in case.args.items():
        if name not in ARGS and not isinstance(value, bool | float) and set(_whole(value)) & set(to):
            raise refuse(f"{name}={value}, which may be a size")
    return replace(
        case, axes={k: tied(v, k) for k, v in case.axes.items()},
        draw=law(case.draw), draws={k: law(v) for k, v in case.draws.items()},
        args={k: tied(v, k, True) if k in ARGS else v for k, v in case.args.items()},
    )  # fmt: skip


def _counterpart(task: Task, case: Case) -> Case:
    sizes, square = _sizes(task, case), _square(task, case)
    more = {s for s in sizes if s >= LONG} or ({s for s in sizes if s >= SHORT} if not square else set())
    # Squares first: a matrix stays one. Of what would make the work too small the shortest stays as it is.
    wanted = [*sorted(square, reverse=True), *sorted(more - square, reverse=True)]
    for share in SHARES:
        for count in range(len(wanted), 0, -1):
            other = resized(task, case, {s: _part(task, s, share) for s in wanted[:count]})
            if similar(task, case, other):
                return other
    raise DeclarationError(f"{task.id}: case {case.label()!r}: no axis can be resized; declare held_timed=")


def _part(task: Task, size: int, share: float) -> int:
    """The share of a size: in half of the tasks, chosen by name, rounded up to two decimal digits where it is large."""
    part = round(size * share)
    if size < ROUND or zlib.crc32(task.id.encode()) % 2:
        return part
    unit = 10 ** (len(str(part)) - 2)
    return -(-part // unit) * unit


def _shapes(task: Task, case: Case) -> Iterator[tuple[int, ...]]:
    for name, t in task.takes.items():
        if name not in case.args and (not t.optional or name in case.given):
            yield shape_of(t, case.axes)


def _sizes(task: Task, case: Case) -> set[int]:
    """Sizes of the tensors' axes; of a task without tensors, those that its arguments say."""
    if task.takes:
        return {size for shape in _shapes(task, case) for size in shape}
    return {size for name in ARGS for size in _whole(case.args.get(name))}


def _square(task: Task, case: Case) -> set[int]:
    """Sizes of square matrices and pictures."""
    return {s[-1] for s in _shapes(task, case) if len(s) > 1 and s[-1] == s[-2] and s[-1] >= SHORT}


def _whole(value: Any) -> list[int]:
    if isinstance(value, tuple | list):
        return [n for v in value for n in _whole(v)]
    return [value] if isinstance(value, int) and not isinstance(value, bool) else []
