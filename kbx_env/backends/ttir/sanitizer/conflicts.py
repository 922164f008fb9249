"""Watch a launch in which programs that may wait for one another run together, and give up at the first doubt.

The launch has up to three phases (see ``interp/lockstep.py``): programs run together, then in turns while they wait for
one another, then together again. In the turns everything happens in the same order as if every program ran on its own
from the beginning, so the same accesses are synchronised, and ``sanitizer.Watch`` watches the turns as it would then.
Two accesses of one element by different programs in two phases, one of them a write, are harmless only if the turns
synchronised the program of the earlier phase with that of the later one; within the first and within the last phase
none are. With anything else, with a finding of any kind, and where it is not known which of several programs made an
access, the watch raises ``GaveUp``. It therefore accepts no launch in which ``Watch`` would report something if the
programs ran one by one; and in a launch that it accepts every load finds the same value as then.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

import numpy as np

from kbx_env.backends.ttir.errors import Finding
from kbx_env.backends.ttir.frontend.graph import Module, Op
from kbx_env.backends.ttir.interp.hooks import LoadHook, Pick, ProgramChunk, StoreHook
from kbx_env.backends.ttir.interp.memory import Memory
from kbx_env.backends.ttir.sanitizer.sanitizer import OLD, SYNC_LANES, TIMED_ARRAYS, Sanitizer, Watch, _Access
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

    The shadow of a watched region has, besides the arrays of ``Watch`` for the turns, for each grain the program that
    stored and loaded it in the first phase (``stored_before``, ``loaded_before``) and in the last one (``stored_after``,
    ``loaded_after``), and the program that waited for it with volatile loads (``looked_at``).

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
        self._ordered = np.zeros((0, 0), bool)
        self._all_ordered = False

    def begin_after(self) -> None:
        """Begin the last phase: find out which programs have synchronised since the first one."""
        self.phase = AFTER
        first: dict[int, dict[int, int]] = {}
        last: dict[int, dict[int, int]] = {}
        for program, done in self.sync.operations().items():
            for time, address, writes in done:
                if writes:
                    first.setdefault(address, {}).setdefault(program, time)
                last.setdefault(address, {})[program] = time
            if len({address for _, address, _ in done}) >= OLD:
                raise GaveUp("Watch would not search so many locations")
        if sum(len(times) * len(last[address]) for address, times in first.items()) > _MAX_PAIRS:
            raise GaveUp("too many pairs")
        ordered = np.eye(self._total + 1, dtype=bool)
        for address, times in first.items():
            earlier, later = (np.array(list(by), np.int64) for by in (times, last[address]))
            then = np.array(list(last[address].values()), np.int64)
            ordered[np.ix_(earlier, later)] |= np.array(list(times.values()), np.int64)[:, None] < then
        self._ordered, self._all_ordered = ordered, bool(ordered[1:, 1:].all())

    # -- hooks -------------------------------------------------------------------------
    def loading(self, m: ProgramChunk, op: Op, size: int) -> LoadHook | None:
        """Return the hook for a load of elements of ``size`` bytes, ``None`` when there is nothing to watch."""
        in_turns = super().loading(m, op, size)
        if in_turns is None:
            return None

        def hook(k: int, offsets: Array, pick: Pick) -> None:
            self._require_written(k, offsets, size)
            if k not in self.watched or not offsets.size:
                return
            shadow = self._shadow(k)
            programs = self._program_numbers(m, pick, len(offsets))
            at = shadow.at(offsets, size)
            a, one = shadow.arrays, like(programs, at)
            if self.phase == BEFORE:
                self._refuse_others(a["stored_before"], at, one)
                self._refuse_others(a["updated_by"], at, one)
                record(a["loaded_before"], at, one)
            elif self.phase == AFTER:
                self._refuse_others(a["stored_after"], at, one)
                self._require_order(m, entries(a["stored_before"], at), one)
                self._require_order_since(m, a, "stored_by", "stored_at", at, one)
                self._require_order_since(m, a, "updated_by", "updated_at", at, one)
                record(a["loaded_after"], at, one)
            elif op.attrs.get("isVolatile") and len(offsets) <= SYNC_LANES:
                self._refuse_others(a["stored_before"], at, one)
                record(a["looked_at"], at, one)
                in_turns(k, offsets, pick)
            else:
                self._require_order_in_turns(a["stored_before"], at, one)
                in_turns(k, offsets, pick)

        return hook

    def storing(self, m: ProgramChunk, op: Op, size: int) -> StoreHook:
        """Return the hook for a store of elements of ``size`` bytes."""
        in_turns = super().storing(m, op, size)

        def hook(k: int, offsets: Array, values: Array, pick: Pick) -> Callable[[], None] | None:
            if k not in self.watched:
                return in_turns(k, offsets, values, pick)
            shadow = self._shadow(k)
            programs = self._program_numbers(m, pick, len(offsets))
            at = shadow.at(offsets, size)
            a, one = shadow.arrays, like(programs, at)
            if self.phase == TURNS:
                self._require_order_in_turns(a["stored_before"], at, one)
                self._require_order_in_turns(a["loaded_before"], at, one)
                self._require_order_since(m, a, "stored_by", "stored_at", at, one)
                return in_turns(k, offsets, values, pick)
            if k in self.written_masks:
                mark(self.written_masks[k], offsets, size)
            if (programs < 0).any():
                raise GaveUp("a store of several programs")
            if self.phase == BEFORE:
                stored, loaded = a["stored_before"], a["loaded_before"]
                self._refuse_others(a["updated_by"], at, one)
            else:
                stored, loaded = a["stored_after"], a["loaded_after"]
                self._refuse_others(a["looked_at"], at, one)
                self._require_order(m, entries(a["stored_before"], at), one)
                self._require_order(m, entries(a["loaded_before"], at), one)
                self._require_order_since(m, a, "stored_by", "stored_at", at, one)
                self._require_order_since(m, a, "loaded_by", "loaded_at", at, one)
                self._require_order_since(m, a, "updated_by", "updated_at", at, one)
            self._refuse_others(stored, at, one)
            self._refuse_others(loaded, at, one)
            stored[at] = one
            if not shadow.shared(at):
                return None
            if clashes(stored, at, one) is not None:
                raise GaveUp("a store of several programs")
            return self._check_lanes(_Access(m, op, "store", k, offsets, size), values, programs)

        return hook

    def updating(self, m: ProgramChunk, op: Op, k: int, offsets: Array, programs: Array, size: int) -> None:
        """Watch an atomic operation; the arguments are those of ``LaunchWatch.updating``."""
        if self.phase == AFTER:
            raise GaveUp("an atomic operation after the turns")
        self._require_written(k, offsets, size)
        shadow = self._shadow(k)
        at = shadow.at(offsets, size)
        a, one = shadow.arrays, like(self._numbers(m)[programs], at)
        if self.phase == BEFORE:
            self._refuse_others(a["stored_before"], at, one)
            self._refuse_others(a["loaded_before"], at, one)
            record(a["updated_by"], at, one)
            return
        super().updating(m, op, k, offsets, programs, size)
        # As in Watch, this operation may itself be the one that synchronises.
        self._require_order_in_turns(a["stored_before"], at, one)
        self._require_order_in_turns(a["loaded_before"], at, one)

    # -- details -----------------------------------------------------------------------
    def _shadow(self, k: int) -> Shadow:
        found = self.shadows.get(k)
        if found is None:
            names = ["stored_by", "loaded_by", "updated_by", *TIMED_ARRAYS]
            names += ["stored_before", "loaded_before", "stored_after", "loaded_after", "looked_at"]
            found = self.shadows[k] = Shadow(self.memory.regions[k].data.size, dict.fromkeys(names, np.int32))
        return found

    def _require_written(self, k: int, offsets: Array, size: int) -> None:
        if k in self.written_masks and not written(self.written_masks[k], offsets, size).all():
            raise GaveUp("an unwritten element")

    def _refuse_others(self, shadow: Array, at: Array | slice, one: Array) -> None:
        """Give up if an element was accessed before by another program than ``one``."""
        before = entries(shadow, at)
        if before.any() and _others(before, one).any():
            raise GaveUp("a conflict")

    def _require_order(self, m: ProgramChunk, before: Array, one: Array) -> None:
        """Give up if a program of the first phase did not synchronise with the one of the last phase that runs now.

        Args:
            m: The programs that run together.
            before: The programs of the earlier access, by shadow entry.
            one: Program of each lane, broadcastable to ``before``.
        """
        if self._all_ordered or not before.any():
            return
        other = _others(before, one)
        first, then = before[other], np.broadcast_to(one, before.shape)[other]
        if (first < 0).any():
            raise GaveUp("one of several programs")
        shared = then < 0
        now = self._numbers(m)[m.live()]
        if not self._ordered[first[~shared], then[~shared]].all():
            raise GaveUp("a conflict")
        if shared.any() and not self._ordered[np.ix_(np.unique(first[shared]), now)].all():
            raise GaveUp("a conflict")

    def _require_order_in_turns(self, shadow: Array, at: Array | slice, one: Array) -> None:
        """The same for the program whose turn it is."""
        before = entries(shadow, at)
        if not before.any():
            return
        then = int(one.reshape(-1)[0])
        for first in np.unique(before[_others(before, one)]).tolist():
            if first < 0 or not self.sync.ordered(first, 0, then):
                raise GaveUp("a conflict")

    def _require_order_since(
        self, m: ProgramChunk, arrays: dict[str, Array], who: str, when: str, at: Array | slice, one: Array
    ) -> None:
        """Give up if a program did not synchronise, after an access in the turns, with the one that runs now.

        Args:
            m: The programs that run together.
            arrays: The shadow.
            who: Name of the array with the programs of the access.
            when: Name of the array with its times.
            at: The entries.
            one: Program of each lane, broadcastable to the entries.
        """
        before = entries(arrays[who], at)
        if not before.any():
            return
        other = _others(before, one)
        if not other.any():
            return
        if not self.timed:
            raise GaveUp("a conflict")
        # An atomic operation counts itself.
        times = entries(arrays[when], at)[other] - (who == "updated_by")
        known = np.stack([before[other], times, np.broadcast_to(one, before.shape)[other]])
        now = self._numbers(m)[m.live()].tolist()
        for first, since, then in np.unique(known, axis=1).T.tolist():
            for q in now if then < 0 else [then]:
                if first < 0 or (q != first and not self.sync.ordered(first, since, q)):
                    raise GaveUp("a conflict")


def _others(before: Array, one: Array) -> Array:
    """Return which entries another program than ``one`` accessed."""
    return np.asarray((before != 0) & ((before != one) | (one < 0)))
