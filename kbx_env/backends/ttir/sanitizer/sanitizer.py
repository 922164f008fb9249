"""Find faults of kernels that a run on a GPU does not report: races, uninitialised reads, stray pointers.

How races are found: the executor runs the programs of a launch in some order, a GPU in no fixed one. For each element
of a written buffer the launch remembers which program last stored, loaded and atomically updated it. An access to an
element that another program accessed before is a race unless

* both only loaded it, or both only updated it atomically,
* both stored the same value (two lanes of one program that store different values to one element are a fault, too),
* or they are synchronised: after the earlier access its program did an atomic operation on some
  location, and later but before now the accessing program did one on the same location. Any atomic
  operation of at most four lanes counts, relaxed ones too and also the earlier access itself; a
  volatile load of as few lanes counts for the accessing program only: it tells others nothing.

Buffers that the kernel never writes are not watched: loads of pure inputs cost nothing. In a kernel
without atomic operations, any program may load a value if all programs that stored it stored the same one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from kbx_env.backends.ttir.errors import Finding as Finding
from kbx_env.backends.ttir.frontend.graph import Module, Op
from kbx_env.backends.ttir.interp.hooks import Extent, LoadHook, Pick, ProgramChunk, StoreHook
from kbx_env.backends.ttir.interp.memory import Memory
from kbx_env.backends.ttir.interp.slices import ATOMICS, LOADS, STORES, accessed, unknown_access
from kbx_env.backends.ttir.sanitizer.shadow import (
    Array,
    Shadow,
    any_nonzero,
    bits,
    clashes,
    entries,
    like,
    mark,
    record,
    written,
)

SYNC_LANES = 4
"""Largest number of lanes of an atomic operation that counts as a lock or a counter; more lanes are data."""
_LIMIT = 20
"""Largest number of findings that are kept."""
TIMED_ARRAYS = [
    "stored_at", "loaded_at", "last_loader", "other_loaded_at", "other_loader", "updated_by", "updated_at", "last_updater",
    "other_updated_at", "other_updater",
]  # fmt: skip
"""Shadow arrays of kernels with atomic operations, besides the two of every kernel; see ``Watch``."""
OLD = 64
"""Largest number of locations that are searched for synchronisation after an access."""
ONE_PROGRAM = (1, 1, 1)
"""Grid of a launch of one program, which has no other one to be in conflict with."""


class Sanitizer:
    """Collects the findings of any number of launches."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, str, int, str], list[Any]] = {}

    @property
    def findings(self) -> list[Finding]:
        """The first finding of each kind, kernel, line and tensor, at most 20."""
        return [f for f, _ in self._kept.values()]

    @property
    def counts(self) -> list[int]:
        """How many times each finding was seen, in the order of ``findings``; one access of many lanes counts once."""
        return [n for _, n in self._kept.values()]

    def report(self, found: Finding) -> None:
        """Keep a finding, or count it when a finding of its kind, kernel, line and tensor is kept already."""
        key = found.kind, found.kernel, found.line, found.tensor
        if key in self._kept:
            self._kept[key][1] += 1
        elif len(self._kept) < _LIMIT:
            self._kept[key] = [found, 1]

    def watch(self, module: Module, memory: Memory) -> Watch:
        """Start to watch one launch of a module on a memory."""
        return Watch(self, module, memory)


class _Sync:
    """Records the atomic operations of each program: when and on which addresses.

    Times are the counts of ``Watch.time``; programs are numbered from 1.
    """

    def __init__(self) -> None:
        self.new: list[tuple[int, Array, Array, bool]] = []
        self.by_program: dict[int, list[tuple[int, int, bool]]] = {}

    def add(self, time: int, addresses: Array, programs: Array, writes: bool = True) -> None:
        """Record one operation, with the address and the program of each lane: (lanes,); ``writes`` is False for loads."""
        self.new.append((time, addresses, programs, writes))

    def operations(self) -> dict[int, list[tuple[int, int, bool]]]:
        """Return the time and the address of each operation and whether it writes, by program, in order of time."""
        for time, addresses, programs, writes in self.new:
            for address, program in zip(addresses.tolist(), programs.tolist(), strict=True):
                self.by_program.setdefault(program, []).append((time, address, writes))
        self.new = []
        return self.by_program

    def ordered(self, first: int, since: int, then: int) -> bool:
        """Return whether two programs synchronised.

        Args:
            first: The program of the earlier access.
            since: The time of that access.
            then: The program of the later access, which happens now.

        Returns:
            Whether ``first`` did an atomic operation after ``since`` on an address on which ``then`` did a later one, or which
            it loaded later.
        """
        by_program = self.operations()
        released: dict[int, int] = {}
        for time, address, writes in by_program.get(first, ()):
            if time > since and writes:
                released.setdefault(address, time)
                if len(released) == OLD:
                    break
        for time, address, _ in reversed(by_program.get(then, ())):
            at = released.get(address)
            # Within one operation, programs run in the order of their numbers.
            if at is not None and (time > at or (time == at and then > first)):
                return True
            if time <= since:
                break
        return False


@dataclass(frozen=True)
class _Access:
    """The unmasked lanes of one access to one region.

    Attributes:
        m: The programs that run together.
        op: The operation.
        name: "load", "store" or "atomic".
        region: Index of the region.
        offsets: Byte offsets of the lanes: int64, (lanes,).
        size: Bytes of one element.
    """

    m: ProgramChunk
    op: Op
    name: str
    region: int
    offsets: Array
    size: int


class Watch:
    """Watches the accesses of one launch; implements ``hooks.LaunchWatch``.

    Programs are numbered from 1 here; 0 stands for no program and -1 for several. The shadow of a watched region has
    these arrays, int32, one entry per grain: ``stored_by``, the program that stored last, and ``loaded_by``, the
    program that loaded since then. In kernels with atomic operations also ``updated_by``, the program that updated it,
    the times ``stored_at``, ``loaded_at`` and ``updated_at``, and, where several programs loaded or updated, the last
    one of them in ``last_loader`` and ``last_updater``, and the last other one and its time in ``other_loader``,
    ``other_loaded_at``, ``other_updater`` and ``other_updated_at``.

    Args:
        owner: Where findings are reported.
        module: The module of the kernel.
        memory: The memory of the launch.

    Attributes:
        time: Number of watched accesses so far.
        timed: Whether the kernel has atomic operations.
        watched: Indices of the regions that the kernel's text may write.
        loaded: Indices of the regions that the kernel's text may load.
        shadows: Shadows of the watched regions that were accessed, by index.
        bounds: What an access may touch, by the arguments that its pointer may come from.
        unwatched: Whether loads need no watching, by the arguments that their pointer may come from.
        written_masks: Masks of written bytes of the regions with unwritten bytes, by index.
        unwritten: Number of accesses so far that read bytes that nothing has written.
        may_read_unwritten: Whether the kernel's text can read such bytes.
    """

    def __init__(self, owner: Sanitizer, module: Module, memory: Memory) -> None:
        self.owner, self.memory, self.report = owner, memory, owner.report
        self.time = 0
        self.sync = _Sync()
        atomic = accessed(module, ATOMICS)
        self.timed = bool(atomic)
        self.watched = self._regions(accessed(module, STORES)) | self._regions(atomic)
        self.loaded = self._regions(accessed(module, LOADS))
        if unknown_access(module):
            self.watched = self.loaded = set(range(len(memory.regions)))
        self.shadows: dict[int, Shadow] = {}
        self.bounds: dict[tuple[int, ...], tuple[Extent, ...]] = {}
        self.unwatched: dict[tuple[int, ...], bool] = {}
        self.programs: tuple[ProgramChunk | None, Array] = (None, np.zeros(0, np.int32))
        self.written_masks = {
            k: r.initialised for k, r in enumerate(memory.regions)
            if r.initialised is not None and not r.initialised.all()
        }  # fmt: skip
        self.unwritten = 0
        self.may_read_unwritten = bool((self.loaded | self._regions(atomic)) & self.written_masks.keys())

    def _regions(self, args: frozenset[int]) -> set[int]:
        out = set()
        for a in args:
            at = self.memory.address(a)
            k = int(np.searchsorted(self.memory.bases, at, "right")) - 1
            if k >= 0 and at < self.memory.ends[k]:
                out.add(k)
        return out

    # -- bounds ------------------------------------------------------------------------
    def extents(self, op: Op) -> tuple[Extent, ...]:
        """Return what an access may touch, () when its pointer's origin is unknown."""
        args = op.attrs.get("tensors", ())
        found = self.bounds.get(args)
        if found is None:
            found = self.bounds[args] = tuple(self.memory.extent(a) for a in args)
        return found

    # -- hooks -------------------------------------------------------------------------
    def loading(self, m: ProgramChunk, op: Op, size: int) -> LoadHook | None:
        """Return the hook for a load of elements of ``size`` bytes, ``None`` when there is nothing to watch."""
        alone = m.grid == ONE_PROGRAM
        if (alone and not self.written_masks) or self._needs_no_watching(op):
            return None
        volatile = bool(op.attrs.get("isVolatile"))

        def hook(k: int, offsets: Array, pick: Pick) -> None:
            access = _Access(m, op, "load", k, offsets, size)
            if k in self.written_masks:
                self._uninitialised(access, pick)
            if alone or k not in self.watched or not offsets.size:
                return
            programs = self._program_numbers(m, pick, len(offsets))
            self.time += 1
            if volatile and len(offsets) <= SYNC_LANES * m.programs:
                self.sync.add(self.time, self._address(k, offsets), programs, writes=False)
                return
            self._load(access, programs)

        return hook

    def _needs_no_watching(self, op: Op) -> bool:
        """Return whether a load reads only regions that the kernel does not write and that hold no unwritten bytes."""
        args = op.attrs.get("tensors", ())
        if args and args not in self.unwatched:
            self.unwatched[args] = not self._regions(frozenset(args)) & (self.watched | self.written_masks.keys())
        return bool(args) and self.unwatched[args]

    def storing(self, m: ProgramChunk, op: Op, size: int) -> StoreHook:
        """Return the hook for a store of elements of ``size`` bytes."""

        def hook(k: int, offsets: Array, values: Array, pick: Pick) -> Callable[[], None] | None:
            if k in self.written_masks:
                mark(self.written_masks[k], offsets, size)
            if k not in self.watched:
                return None
            access = _Access(m, op, "store", k, offsets, size)
            if m.grid == ONE_PROGRAM:
                return self._store_alone(access, values)
            self.time += 1
            programs = self._program_numbers(m, pick, len(offsets))
            return self._store(access, values, programs)

        return hook

    def updating(self, m: ProgramChunk, op: Op, k: int, offsets: Array, programs: Array, size: int) -> None:
        """Watch an atomic operation.

        Args:
            m: The programs that run together.
            op: The operation.
            k: Index of the region.
            offsets: Byte offsets of the unmasked lanes: int64, (lanes,).
            programs: Position in the chunk of each lane's program: (lanes,).
            size: Bytes of one element.
        """
        access = _Access(m, op, "atomic", k, offsets, size)
        if k in self.written_masks:
            if op.attrs.get("word") != "exch" or op.used:
                self._uninitialised(access, lambda v, _: v[programs])
            mark(self.written_masks[k], offsets, size)
        if m.grid == ONE_PROGRAM:
            return
        self.time += 1
        numbers = self._numbers(m)[programs]
        if op.rtypes[0].size <= SYNC_LANES:
            self.sync.add(self.time, self._address(k, offsets), numbers)
        shadow = self._shadow(k)
        at = shadow.at(offsets, size)
        a = shadow.arrays
        one = like(numbers, at)
        detail = "one of them with an ordinary store, the other one atomically"
        self._check(access, "write_conflict", entries(a["stored_by"], at), one, entries(a["stored_at"], at), detail)
        detail = "another program loads it"
        loaded = entries(a["loaded_by"], at), one, entries(a["loaded_at"], at)
        self._check(access, "order_dependent", *loaded, detail, self._last(a, "load", at))
        record(a["updated_by"], at, one)
        self._note(m, a, "updat", at, one)

    def unwritten_again(self, k: int) -> None:
        """Note that bytes of region ``k`` were overwritten with unwritten values, and that its mask says so."""
        mask = self.memory.regions[k].initialised
        assert mask is not None
        self.written_masks[k] = mask
        self.unwatched.clear()

    # -- races -------------------------------------------------------------------------
    def _load(self, access: _Access, programs: Array) -> None:
        """Check a load and record it; ``programs`` are the numbers of the lanes' programs: (lanes,)."""
        shadow = self._shadow(access.region)
        at = shadow.at(access.offsets, access.size)
        a = shadow.arrays
        one = like(programs, at)
        times = entries(a["stored_at"], at) if self.timed else None
        detail = "another program stores to it"
        self._check(access, "order_dependent", entries(a["stored_by"], at), one, times, detail)
        if self.timed:
            detail = "another program updates it atomically"
            updated = entries(a["updated_by"], at), one, entries(a["updated_at"], at) - 1
            self._check(access, "order_dependent", *updated, detail, self._last(a, "updat", at))
            self._note(access.m, a, "load", at, one)
        record(a["loaded_by"], at, one)

    def _store(self, access: _Access, values: Array, programs: Array) -> Callable[[], None] | None:
        """Check a store before it happens and record it.

        Args:
            access: The store.
            values: Its values: (lanes,).
            programs: Numbers of the lanes' programs: (lanes,).

        Returns:
            A check to run after the store, if several lanes store to one element.
        """
        shadow = self._shadow(access.region)
        at = shadow.at(access.offsets, access.size)
        a = shadow.arrays
        one = like(programs, at)
        before = entries(a["stored_by"], at)
        others = one
        if any_nonzero(before) and any_nonzero(other := (before != 0) & (before != one)):
            lane = other if other.ndim == 1 else other.any(axis=1)
            same = self._stored_bits(access, slice(None), values) == bits(values, access.size)
            differ = like(lane & ~same, at) & other
            times = entries(a["stored_at"], at) if self.timed else None
            self._check(access, "write_conflict", np.where(differ, before, 0), one, times, "the values differ")
            if not self.timed:
                # All of them stored the same value, so each of them may load it.
                others = np.where(other & like(same, at), -1, one)
        if self.timed:
            detail = "one of them with an ordinary store, the other one atomically"
            updated = entries(a["updated_by"], at), one, entries(a["updated_at"], at) - 1
            self._check(access, "write_conflict", *updated, detail, self._last(a, "updat", at))
            a["stored_at"][at] = self.time
        if access.region in self.loaded:
            times, last = (entries(a["loaded_at"], at), self._last(a, "load", at)) if self.timed else (None, None)
            detail = "another program loads it"
            self._check(access, "order_dependent", entries(a["loaded_by"], at), one, times, detail, last)
            a["loaded_by"][at] = 0
        a["stored_by"][at] = others
        if not shadow.shared(at):
            return None
        lost = clashes(a["stored_by"], at, others)
        if lost is None:
            return self._check_lanes(access, values, programs)
        lane = lost if lost.ndim == 1 else np.asarray(lost.any(axis=1))
        a["stored_by"][at[lane]] = -1  # type: ignore[index]
        return self._check_lanes(access, values, programs, lane)

    def _store_alone(self, access: _Access, values: Array) -> Callable[[], None] | None:
        """Check a store of a program that runs alone, as ``_store`` does: only its own lanes can be in conflict."""
        shadow = self._shadow(access.region)
        if not shadow.shared(shadow.at(access.offsets, access.size)):
            return None
        return self._check_lanes(access, values, np.ones(len(values), np.int32))

    def _check_lanes(
        self, access: _Access, values: Array, programs: Array, lost: Array | None = None
    ) -> Callable[[], None]:  # fmt: skip
        """Return a check whether lanes of a store have stored different values to one element, to run after the store.

        Args:
            access: The store.
            values: Its values: (lanes,).
            programs: Numbers of the lanes' programs: (lanes,).
            lost: Which lanes' elements a lane of another program overwrote: (lanes,); ``None`` for none.

        Returns:
            The check.
        """

        def after() -> None:
            # The last lane's value stays.
            differ = self._stored_bits(access, slice(None), values) != bits(values, access.size)
            if not differ.any():
                return
            kind = "lane_conflict"
            if lost is not None and (differ & lost).any():
                kind, differ = "write_conflict", differ & lost
            n = int(np.argmax(differ))
            number = int(programs[n])
            number = self._another_program(access.m, 0) if number < 0 else number
            self._found(access, kind, int(access.offsets[n]), number, "the values differ")

        return after

    def _check(
        self, access: _Access, kind: str, first: Array, then: Array, times: Array | None, detail: str,
        last: tuple[Array, Array, Array] | None = None,
    ) -> None:  # fmt: skip
        """Report the first lane whose element was accessed before by another program.

        Args:
            access: The access.
            kind: "write_conflict" or "order_dependent".
            first: Program of the earlier access, by shadow entry: (lanes,) or (lanes, grains).
            then: Program of each lane, broadcastable to ``first``.
            times: Times of the earlier access, shape of ``first``; ``None`` where nothing can have synchronised.
            detail: Text of the finding.
            last: Where ``first`` is -1, the last program of several, the last other one, and the time of its access, each of the
                shape of ``first``.
        """
        if not any_nonzero(first):
            return
        # When several programs load an element that several updated, some load what another program updated.
        bad = (first != 0) & (first != then if last is None else (first != then) | (then == -1))
        if kind == "order_dependent" and access.name == "load":
            # The several programs that stored one value may include the one that loads.
            bad &= first != -1 if last is None else True
        if not any_nonzero(bad):
            return
        if last is not None:
            # Of several programs the last two are known: one of them is another one than the accessing program.
            latest, other, when = last
            own = (first == -1) & (latest == then)
            first = np.where(own, other, np.where(first == -1, latest, first))
            times = np.where(own, when, times) if times is not None else None
        lanes = np.nonzero(bad)
        chosen = np.broadcast_to(then, bad.shape)[lanes]
        if times is not None:
            known = np.stack([first[lanes], times[lanes], chosen])
            pairs, where = np.unique(known, axis=1, return_index=True)
            for (f, t, q), n in zip(pairs.T.tolist(), where.tolist(), strict=True):
                q = self._another_program(access.m, f) if q < 0 else q
                if f > 0 and not self.sync.ordered(f, t, q):
                    self._found(access, kind, int(access.offsets[lanes[0][n]]), q, detail)
                    return
            return
        if len(chosen):
            q = int(chosen[0])
            q = self._another_program(access.m, int(first[lanes][0])) if q < 0 else q
            self._found(access, kind, int(access.offsets[lanes[0][0]]), q, detail)

    # -- details -----------------------------------------------------------------------
    def _note(self, m: ProgramChunk, a: dict[str, Array], what: str, at: Array | slice, one: Array) -> None:
        """Record the last two programs that loaded or updated elements, and when.

        Args:
            m: The programs that run together.
            a: Arrays of the shadow.
            what: "load" or "updat", the beginning of the arrays' names.
            at: The entries.
            one: Program of each lane, -1 where one lane stands for all; broadcastable to the entries.
        """
        last, other = ("last_loader", "other_loader") if what == "load" else ("last_updater", "other_updater")
        when, other_when = f"{what}ed_at", f"other_{what}ed_at"
        before = entries(a[last], at)
        if (one < 0).any():
            live = self._numbers(m)[m.live()]
            lowest, one = live.min(), np.where(one < 0, live.max(), one)
            a[other][at], a[other_when][at] = lowest, self.time
        elif (new := (before != 0) & (before != one)).any():
            a[other][at] = np.where(new, before, entries(a[other], at))
            a[other_when][at] = np.where(new, entries(a[when], at), entries(a[other_when], at))
        a[last][at] = one
        a[when][at] = self.time
        lost = clashes(a[last], at, one)
        if lost is not None:
            # Several of the programs that run together: the last lane's stays.
            a[other][at[lost]] = np.broadcast_to(one, lost.shape)[lost]  # type: ignore[index]
            a[other_when][at[lost]] = self.time  # type: ignore[index]

    @staticmethod
    def _last(a: dict[str, Array], what: str, at: Array | slice) -> tuple[Array, Array, Array]:
        """Return what ``_check`` takes as ``last``, for loads or updates."""
        names = ("last_loader", "other_loader") if what == "load" else ("last_updater", "other_updater")
        last, other, when = (entries(a[name], at) for name in (*names, f"other_{what}ed_at"))
        return last, other, when - (what == "updat")

    def _shadow(self, k: int) -> Shadow:
        found = self.shadows.get(k)
        if found is None:
            names = ["stored_by", "loaded_by"] + (TIMED_ARRAYS if self.timed else [])
            found = self.shadows[k] = Shadow(self.memory.regions[k].data.size, dict.fromkeys(names, np.int32))
        return found

    def _numbers(self, m: ProgramChunk) -> Array:
        if self.programs[0] is not m:
            x, y, z = (p.astype(np.int64) for p in m.pids)
            self.programs = m, (x + m.grid[0] * (y + m.grid[1] * z) + 1).astype(np.int32)
        return self.programs[1]

    def _program_numbers(self, m: ProgramChunk, pick: Pick, lanes: int) -> Array:
        """Return the number of each lane's program: int32, (lanes,); -1 where one lane stands for several programs."""
        numbers = self._numbers(m)
        if m.programs == 1:
            return np.full(lanes, numbers[0])
        shared = -1 if m.count() > 1 else int(numbers[np.argmax(m.live())])
        return pick(numbers, shared)

    def _another_program(self, m: ProgramChunk, but: int) -> int:
        """Return the number of an active program, another one than ``but`` if there is one."""
        active = self._numbers(m)[m.live()]
        return int(active[np.argmax(active != but)])

    def _address(self, k: int, offsets: Array) -> Array:
        return offsets + self.memory.regions[k].base

    def _stored_bits(self, access: _Access, lanes: Array | slice, values: Array) -> Array:
        """Return the elements that are in memory now as unsigned integers; ``values`` gives their dtype."""
        return bits(self.memory.gather(access.region, access.offsets[lanes], values.dtype), access.size)

    def _uninitialised(self, access: _Access, pick: Pick) -> None:
        """Report the first lane that reads unwritten bytes."""
        bad = ~written(self.written_masks[access.region], access.offsets, access.size)
        if any_nonzero(bad):
            self.unwritten += 1
            n = int(np.argmax(bad))
            q = int(self._program_numbers(access.m, pick, len(access.offsets))[n])
            q = self._another_program(access.m, 0) if q < 0 else q
            self._found(access, "uninitialised_read", int(access.offsets[n]), q, "")

    def _found(self, access: _Access, kind: str, offset: int, number: int, detail: str) -> None:
        """Report a finding.

        Args:
            access: The access.
            kind: Kind of the finding.
            offset: Byte offset of the element in the region.
            number: Number of the program.
            detail: Text of the finding.
        """
        m, op = access.m, access.op
        file, line = m.where(op)
        x = number - 1
        program = (x % m.grid[0], x // m.grid[0] % m.grid[1], x // (m.grid[0] * m.grid[1]))
        region = self.memory.regions[access.region]
        args = op.attrs.get("tensors", ())
        name, first = region.name, region.base
        if len(args) == 1:
            name, first = self.memory.label(args[0]), self.memory.address(args[0])
        index = (region.base + offset - first) // access.size
        indirect = bool(op.attrs.get("indirect", True))
        self.report(Finding(kind, m.kernel, line, file, program, name, index, 0, detail, access.name, indirect))
