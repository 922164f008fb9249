"""Describes a schedule of an expert kernel as moves: assigns the kernel's numbers to slots, and applies moves to them.

Every template has the same eight slots, of the kinds ``SLOTS``, so that one policy serves all tasks. If a kernel has no
more knobs (``baselines/search/knobs.py``) of a kind than slots, every knob has its own slot. If it has more, knobs with
the same name in the same function share a slot; if these are still too many, knobs with the same name in any function
share one; the knobs that are left join the last slot of their kind.

A move is a number of steps along a knob's choices, counted from the expert's own value; it stops at the ends. Without
moves the schedule is that of the unchanged expert.
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
"""Kind of knob of each slot."""
MOVES = (-2, -1, 0, 1, 2)
"""Steps along the choices of a knob."""
MIDDLE = MOVES.index(0)
"""Index of the move that changes nothing."""
REACHES = tuple(range(1, max(MOVES) + 1))
"""Accepted values for the most steps of a move; with 1 a slot has the three moves -1, 0 and 1."""
_ORDER = ("block", "warps", "stages", "group")
assert set(SLOTS) == set(_ORDER) == set(KINDS)


@dataclass(frozen=True)
class Template:
    """An expert's source, with its knobs in slots.

    Attributes:
        task: id of the task.
        source: the expert's source.
        slots: for each of ``SLOTS`` the knobs in it; may be empty.
        idle: names of knobs that are in no slot, because they do not change the launches of the timed shapes.
        reach: the most steps of a move.
    """

    task: str
    source: str
    slots: tuple[tuple[Knob, ...], ...]
    idle: tuple[str, ...] = ()
    reach: int = max(MOVES)

    def settings(self, action: Sequence[int] | np.ndarray) -> dict[str, int]:
        """Return the settings that an action means.

        Args:
            action: integers of shape (8,): for each slot an index from 0 to ``2 * reach`` into the moves ``-reach`` to
                ``reach``. Slots without knobs are ignored.

        Returns:
            The new values of the knobs that change, by name.
        """
        found = {}
        for index, knobs in zip(action, self.slots, strict=True):
            for knob in knobs:
                value = moved(knob, int(index) - self.reach)
                if value != knob.value:
                    found[knob.name] = value
        return found

    def render(self, action: Sequence[int] | np.ndarray) -> str:
        """Return the expert's source with the settings of an action (see ``settings``)."""
        return with_knobs(self.source, self.settings(action))

    def legal(self, slot: int) -> tuple[bool, ...]:
        """Return for each of ``MOVES`` whether it is within reach and has another effect than a shorter move.

        Args:
            slot: index of the slot.

        Returns:
            One truth value for each of ``MOVES``; always true for the middle.
        """

        def differs(move: int) -> bool:
            return any(0 <= k.choices.index(k.value) + move < len(k.choices) for k in self.slots[slot])

        return tuple(m == 0 or (abs(m) <= self.reach and differs(m)) for m in MOVES)


def moved(knob: Knob, steps: int) -> int:
    """Return the value that lies some steps from a knob's own value.

    Args:
        knob: the knob.
        steps: along its choices, may be negative; stops at their ends.

    Returns:
        The value, one of the knob's choices.
    """
    at = knob.choices.index(knob.value) + steps
    return knob.choices[max(0, min(at, len(knob.choices) - 1))]


@functools.lru_cache(maxsize=512)
def template(task: str, idle: Collection[str] = (), reach: int = max(MOVES)) -> Template:
    """Make the template of a task's expert.

    Args:
        task: ``category/name``.
        idle: names of knobs that get no slot (a hashable collection).
        reach: the most steps of a move, one of ``REACHES``.

    Returns:
        The template; the same object for the same arguments.

    Raises:
        UsageError: the task has no expert kernel.
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
    """Distribute the knobs of one kind over ``room`` slots, in the order of the source."""
    groups: dict[str, list[Knob]] = {}
    for key in (_unique, _in_function, _called):
        groups = {}
        for k in knobs:
            groups.setdefault(key(k.name), []).append(k)
        if len(groups) <= room:
            break
    rows = [tuple(g) for g in groups.values()]
    rows = [*rows[: room - 1], tuple(k for g in rows[room - 1 :] for k in g)] if len(rows) > room else rows
    return [*rows, *[()] * (room - len(rows))]


def _unique(name: str) -> str:
    return name


def _in_function(name: str) -> str:
    return name.partition("@")[0]


def _called(name: str) -> str:
    return _in_function(name).rpartition(".")[2]


def find_idle(task: str, launched: Callable[[str], str | None]) -> tuple[str, ...]:
    """Find the knobs of a task's expert whose next lower and higher values do not change the timed shapes' launches.

    Args:
        task: ``category/name``.
        launched: returns for a source a key that is equal for sources with the same launches in every timed case, or
            ``None`` if that is unknown: ``CompileReport.launch_hash`` of ``baselines/search/compile_report.py``, which
            takes half a second for each source on the CPU.

    Returns:
        Names of knobs; empty if the launches of the unchanged expert are unknown.
    """
    unchanged = template(task)
    base = launched(unchanged.source)
    if base is None:
        return ()
    idle = []
    for knob in (k for slot in unchanged.slots for k in slot):
        values = {moved(knob, m) for m in (-1, 1)} - {knob.value}
        if all(launched(with_knobs(unchanged.source, {knob.name: v})) == base for v in values):
            idle.append(knob.name)
    return tuple(idle)


def named(settings: Mapping[str, int]) -> str:
    """Return settings as text in one line."""
    return ", ".join(f"{k}={v}" for k, v in sorted(settings.items())) or "as it is"
