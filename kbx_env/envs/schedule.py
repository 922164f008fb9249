"""A schedule of an expert kernel as a few relative moves: which of its numbers share a slot, and what a move does.

Every template has the same eight slots, so that one policy serves all tasks: ``SLOTS`` says their kinds. A slot holds one
knob (``baselines/search/knobs.py``) where the template has no more knobs of a kind than slots. Where it has more, knobs
that bear the same name in the same function move together; then those of the same name anywhere; what is still left joins
the last slot of its kind. A move counts steps along a knob's choices from the expert's own value and stops at their ends:
moving nothing is the expert as it is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from kbx_env.baselines.search.knobs import KINDS, Knob, knobs_of, with_knobs
from kbx_env.errors import UsageError
from kbx_env.spec.catalog import expert_source

SLOTS = ("block", "block", "block", "block", "warps", "warps", "stages", "group")
MOVES = (-2, -1, 0, 1, 2)
MIDDLE = MOVES.index(0)
REACHES = tuple(range(1, max(MOVES) + 1))
"""How many steps a move may take at most: with 1 a slot has three moves, -1, 0 and 1."""
_ORDER = ("block", "warps", "stages", "group")
assert set(SLOTS) == set(_ORDER) == set(KINDS)


@dataclass(frozen=True)
class Template:
    """An expert's source and what its slots hold.

    ``slots`` has one tuple of knobs for each of ``SLOTS``, empty where the template has nothing for it. ``idle`` are the
    knobs that were left out because the timed shapes do not notice them. ``reach`` is the longest move there is.
    """

    task: str
    source: str
    slots: tuple[tuple[Knob, ...], ...]
    idle: tuple[str, ...] = ()
    reach: int = max(MOVES)

    def settings(self, action: Sequence[int] | np.ndarray) -> dict[str, int]:
        """Knob -> value, for the knobs that an action changes.

        Args:
            action: for each slot an index into the moves within reach (``reach`` is the middle); slots without knobs are ignored.
        """
        found = {}
        for index, knobs in zip(action, self.slots, strict=True):
            for knob in knobs:
                value = moved(knob, int(index) - self.reach)
                if value != knob.value:
                    found[knob.name] = value
        return found

    def render(self, action: Sequence[int] | np.ndarray) -> str:
        """The source with an action's numbers."""
        return with_knobs(self.source, self.settings(action))

    def legal(self, slot: int) -> tuple[bool, ...]:
        """For each of ``MOVES``: whether it is within reach and differs from the moves nearer to the middle."""

        def differs(move: int) -> bool:
            return any(0 <= k.choices.index(k.value) + move < len(k.choices) for k in self.slots[slot])

        return tuple(m == 0 or (abs(m) <= self.reach and differs(m)) for m in MOVES)


def moved(knob: Knob, steps: int) -> int:
    """The value some steps along a knob's choices, at most the last one there is."""
    at = knob.choices.index(knob.value) + steps
    return knob.choices[max(0, min(at, len(knob.choices) - 1))]


@functools.lru_cache(maxsize=512)
def template(task: str, idle: Collection[str] = (), reach: int = max(MOVES)) -> Template:
    """The expert's template for a task.

    Args:
        task: ``category/name``.
        idle: names of knobs that take no slot (a hashable collection).
        reach: the longest move, one of ``REACHES``.

    Raises:
        UsageError: there is no expert kernel for it.
    """
    source = expert_source(task)
    if source is None:
        raise UsageError(f"task {task!r} has no expert kernel to schedule; choose others with tasks=GLOB")
    knobs = [k for k in knobs_of(source) if k.name not in idle]
    slots: list[tuple[Knob, ...]] = []
    for kind in _ORDER:
        slots += _share([k for k in knobs if k.kind == kind], SLOTS.count(kind))
    return Template(task, source, tuple(slots), tuple(sorted(idle)), reach)


def _share(knobs: Sequence[Knob], room: int) -> list[tuple[Knob, ...]]:
    """Knobs of one kind over so many slots, in the source's order."""
    groups: dict[str, list[Knob]] = {}
    for key in (_itself, _in_function, _called):
        groups = {}
        for k in knobs:
            groups.setdefault(key(k.name), []).append(k)
        if len(groups) <= room:
            break
    rows = [tuple(g) for g in groups.values()]
    rows = [*rows[: room - 1], tuple(k for g in rows[room - 1 :] for k in g)] if len(rows) > room else rows
    return [*rows, *[()] * (room - len(rows))]


def _itself(name: str) -> str:
    return name


def _in_function(name: str) -> str:
    return name.partition("@")[0]


def _called(name: str) -> str:
    return _in_function(name).rpartition(".")[2]


def find_idle(task: str, launched: Callable[[str], str | None]) -> tuple[str, ...]:
    """The knobs of a task's expert that the timed shapes do not notice, a step in either direction.

    Args:
        task: ``category/name``.
        launched: source -> a key that is equal for sources which launch the same in every timed case, ``None`` where that
            is not known (``CompileReport.launch_hash`` of ``baselines/search/compile_report.py``; half a second each on the CPU).
    """
    whole = template(task)
    base = launched(whole.source)
    if base is None:
        return ()
    idle = []
    for knob in (k for slot in whole.slots for k in slot):
        values = {moved(knob, m) for m in (-1, 1)} - {knob.value}
        if all(launched(with_knobs(whole.source, {knob.name: v})) == base for v in values):
            idle.append(knob.name)
    return tuple(idle)


def named(settings: Mapping[str, int]) -> str:
    """Settings in one line."""
    return ", ".join(f"{k}={v}" for k, v in sorted(settings.items())) or "as it is"
