"""Watch a launch in which programs that may wait for one another run together, and give up at the first doubt.

The launch is split into up to three phases (see ``interp/lockstep.py``): programs run together, then in turns while they
wait for one another, then together again. In the turns the atomic operations and volatile loads happen in the same
order as if every program ran on its own, so the same accesses are synchronised. Two accesses of one element by
different programs, one of them a write, are then harmless only if one of them is in the first phase, the other one in
the last phase, and the turns between them synchronised the two programs. With anything else, with a finding of any
kind, and where it is not known which of several programs made an access, the watch raises ``GaveUp``. It therefore
accepts no launch in which ``sanitizer.Watch`` would report something if the programs ran one by one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

import numpy as np

from kbx_env.backends.ttir.errors import Finding
from kbx_env.backends.ttir.frontend.graph import Module, Op
from kbx_env.backends.ttir.interp.hooks import LoadHook, Pick, ProgramChunk, StoreHook
from kbx_env.backends.ttir.interp.memory import Memory
from kbx_env.backends.ttir.sanitizer.sanitizer import OLD, SYNC_LANES, Sanitizer, Watch
from kbx_env.backends.ttir.sanitizer.shadow import Array, Shadow, clashes, entries, like, mark, record, written

BEFORE, TURNS, AFTER = range(3)
"""Phases of a launch: together, in turns, together again."""
_MAX_PAIRS = 64 << 20
"""Largest number of pairs of programs and locations that are compared for synchronisation."""


class GaveUp(Exception):
    """It is in doubt whether the programs may run together."""


class _Refusing(Sanitizer):
    """Does not accept a finding."""

    def report(self, found: Finding) -> NoReturn:
        """Give up."""
        raise GaveUp(found.kind)


class ConflictWatch(Watch):
    """Watches one launch; programs are numbered from 1, 0 stands for none and -1 for several.

    The shadow of a watched region has for each grain the programs that stored and loaded it in the first phase
    (``stored``, ``loaded``), touched it in an atomic operation or in the turns (``touched``), and stored and loaded it in
    the last phase (``stored_after``, ``loaded_after``).

    Args:
        module: The module of the kernel.
        memory: The memory of the launch.
        total: Number of programs.

    Attributes:
        phase: The phase that runs: ``BEFORE``, ``TURNS`` or ``AFTER``.
    """

    def __init__(self, module: Module, memory: Memory, total: int) -> None:
        super().__init__(_Refusing(), module, memory)
        self.phase = BEFORE
        self._total = total
        self._first: dict[int, dict[int, int]] = {}
        self._last: dict[int, dict[int, int]] = {}
        self._ordered = np.zeros((0, 0), bool)
        self._all_ordered = False

    def begin_after(self) -> None:
        """Begin the last phase: find out which programs have synchronised."""
        self.phase = AFTER
        if sum(len(f) ** 2 for f in self._first.values()) > _MAX_PAIRS:
            raise GaveUp("too many pairs")
        locations = np.zeros(self._total + 1, np.int64)
        ordered = np.eye(self._total + 1, dtype=bool)
        for address, times in self._first.items():
            programs = np.array(list(times), np.int64)
            locations[programs] += 1
            first = np.array(list(times.values()), np.int64)
            last = np.array(list(self._last[address].values()), np.int64)
            ordered[np.ix_(programs, programs)] |= first[:, None] < last
        if locations.max() >= OLD:
            raise GaveUp("the sanitizer would not search so many locations")
        self._ordered, self._all_ordered = ordered, bool(ordered[1:, 1:].all())

    # -- hooks -------------------------------------------------------------------------
    def loading(self, m: ProgramChunk, op: Op, size: int) -> LoadHook | None:
        """Return the hook for a load of elements of ``size`` bytes, ``None`` when there is nothing to watch."""
        if self._needs_no_watching(op):
            return None

        def hook(k: int, offsets: Array, pick: Pick) -> None:
            self._require_written(k, offsets, size)
            if k not in self.watched or not offsets.size:
                return
            shadow = self._shadow(k)
            programs = self._program_numbers(m, pick, len(offsets))
            at = shadow.at(offsets, size)
            a, one = shadow.arrays, like(programs, at)
            if self.phase == TURNS:
                self._synchronises(k, offsets, programs)
                self._refuse_others(entries(a["stored"], at), one)
                record(a["touched"], at, one)
                return
            self._refuse_others(entries(a["touched"], at), one)
            if self.phase == BEFORE:
                self._refuse_others(entries(a["stored"], at), one)
                record(a["loaded"], at, one)
                return
            self._refuse_others(entries(a["stored_after"], at), one)
            self._require_order(m, entries(a["stored"], at), one)
            record(a["loaded_after"], at, one)

        return hook

    def storing(self, m: ProgramChunk, op: Op, size: int) -> StoreHook:
        """Return the hook for a store of elements of ``size`` bytes."""

        def hook(k: int, offsets: Array, values: Array, pick: Pick) -> Callable[[], None] | None:
            if self.phase == TURNS:
                raise GaveUp("a store between atomic operations")
            if k in self.written_masks:
                mark(self.written_masks[k], offsets, size)
            if k not in self.watched:
                return None
            shadow = self._shadow(k)
            programs = self._program_numbers(m, pick, len(offsets))
            if (programs < 0).any():
                raise GaveUp("a store of several programs")
            at = shadow.at(offsets, size)
            a, one = shadow.arrays, like(programs, at)
            after = "_after" if self.phase == AFTER else ""
            for name in ("touched", "stored" + after, "loaded" + after):
                self._refuse_others(entries(a[name], at), one)
            if self.phase == AFTER:
                self._require_order(m, entries(a["stored"], at), one)
                self._require_order(m, entries(a["loaded"], at), one)
            stored = a["stored" + after]
            stored[at] = one
            if clashes(stored, at, one) is not None:
                raise GaveUp("a store of several programs")
            return None

        return hook

    def updating(self, m: ProgramChunk, op: Op, k: int, offsets: Array, programs: Array, size: int) -> None:
        """Watch an atomic operation; the arguments are those of ``LaunchWatch.updating``."""
        if self.phase == AFTER:
            raise GaveUp("an atomic operation after the turns")
        self._require_written(k, offsets, size)
        numbers = self._numbers(m)[programs]
        if self.phase == TURNS and op.rtypes[0].size <= SYNC_LANES:
            self._synchronises(k, offsets, numbers)
        shadow = self._shadow(k)
        at = shadow.at(offsets, size)
        a, one = shadow.arrays, like(numbers, at)
        self._refuse_others(entries(a["stored"], at), one)
        self._refuse_others(entries(a["loaded"], at), one)
        record(a["touched"], at, one)

    # -- details -----------------------------------------------------------------------
    def _shadow(self, k: int) -> Shadow:
        found = self.shadows.get(k)
        if found is None:
            names = ("stored", "loaded", "touched", "stored_after", "loaded_after")
            found = self.shadows[k] = Shadow(self.memory.regions[k].data.size, dict.fromkeys(names, np.int32))
        return found

    def _require_written(self, k: int, offsets: Array, size: int) -> None:
        if k in self.written_masks and not written(self.written_masks[k], offsets, size).all():
            raise GaveUp("an unwritten element")

    def _synchronises(self, k: int, offsets: Array, programs: Array) -> None:
        """Note the time at which programs looked at some locations: (lanes,)."""
        self.time += 1
        for address, p in zip(self._address(k, offsets).tolist(), programs.tolist(), strict=True):
            self._first.setdefault(address, {}).setdefault(p, self.time)
            self._last.setdefault(address, {})[p] = self.time

    def _refuse_others(self, before: Array, one: Array) -> None:
        """Give up if an element was accessed before by another program than ``one``."""
        if before.any() and ((before != 0) & ((before != one) | (one < 0))).any():
            raise GaveUp("a conflict")

    def _require_order(self, m: ProgramChunk, before: Array, one: Array) -> None:
        """Give up if a program that accessed an element in the first phase did not synchronise with the one that does now.

        Args:
            m: The programs that run together.
            before: The programs of the earlier access, by shadow entry.
            one: Program of each lane, broadcastable to ``before``.
        """
        if self._all_ordered or not before.any():
            return
        other = (before != 0) & ((before != one) | (one < 0))
        first, then = before[other], np.broadcast_to(one, before.shape)[other]
        if (first < 0).any():
            raise GaveUp("one of several programs")
        shared = then < 0
        now = self._numbers(m)[m.live()]
        if not self._ordered[first[~shared], then[~shared]].all():
            raise GaveUp("a conflict")
        if shared.any() and not self._ordered[np.ix_(np.unique(first[shared]), now)].all():
            raise GaveUp("a conflict")
