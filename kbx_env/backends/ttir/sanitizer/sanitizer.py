"""Faults of kernels that a run on a GPU does not report: races, uninitialised reads, stray pointers.

How races are found. Programs of one launch run in some order here, in none on a GPU. For each
element of a written buffer the launch remembers who last stored, loaded and atomically updated it.
An access by one program to what another program touched before is a race unless

* both only loaded it, or both only updated it atomically,
* both stored the same value,
* or they are synchronised: after the earlier access its program did an atomic operation on some
  location, and later but before now the accessing program did one on the same location. Any atomic
  operation of at most four lanes counts, relaxed ones too and also the earlier access itself; a
  volatile load of as few lanes counts for the program that loads.

Buffers that the kernel never writes are not watched: loads of pure inputs cost nothing. In a kernel
without atomic operations, a value that several programs stored alike may be loaded by any program.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from kbx_env.backends.ttir.errors import Finding as Finding
from kbx_env.backends.ttir.frontend.graph import Module, Op
from kbx_env.backends.ttir.interp.hooks import Extent, LoadHook, Pick, ProgramChunk, StoreHook
from kbx_env.backends.ttir.interp.memory import Memory
from kbx_env.backends.ttir.interp.slices import ATOMICS, LOADS, STORES, accessed, unknown_access
from kbx_env.backends.ttir.sanitizer.shadow import Array, Shadow, bits, mark, written

#: More lanes than this are data, not a lock or a counter.
_SYNC_LANES = 4
_LIMIT = 20
_OLD = 64


class Sanitizer:
    """Collects the findings of any number of launches.

    Attributes:
        counts: How often each kept finding was seen, in the order of ``findings``.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[str, str, int, str], list[Any]] = {}

    @property
    def findings(self) -> list[Finding]:
        """The first finding of each kind, kernel, line and tensor, at most 20."""
        return [f for f, _ in self._kept.values()]

    @property
    def counts(self) -> list[int]:
        """How many times each finding was seen; one access of many lanes counts once."""
        return [n for _, n in self._kept.values()]

    def report(self, found: Finding) -> None:
        """Keep a finding, or count it when one like it is held."""
        key = found.kind, found.kernel, found.line, found.tensor
        if key in self._kept:
            self._kept[key][1] += 1
        elif len(self._kept) < _LIMIT:
            self._kept[key] = [found, 1]

    def watch(self, module: Module, memory: Memory) -> Watch:
        """Start to watch one launch."""
        return Watch(self, module, memory)


class _Sync:
    """Who did atomic operations where and when."""

    def __init__(self) -> None:
        self.new: list[tuple[int, Array, Array]] = []
        self.by_program: dict[int, list[tuple[int, int]]] = {}

    def add(self, time: int, places: Array, programs: Array) -> None:
        self.new.append((time, places, programs))

    def ordered(self, first: int, since: int, then: int) -> bool:
        """Return whether ``then`` synchronised with what ``first`` did at time ``since``."""
        for time, places, programs in self.new:
            for place, program in zip(places.tolist(), programs.tolist(), strict=True):
                self.by_program.setdefault(program, []).append((time, place))
        self.new = []
        released: dict[int, int] = {}
        for time, place in self.by_program.get(first, ()):
            if time > since:
                released.setdefault(place, time)
                if len(released) == _OLD:
                    break
        for time, place in reversed(self.by_program.get(then, ())):
            at = released.get(place)
            # Within one operation, programs take their turns in order.
            if at is not None and (time > at or (time == at and then > first)):
                return True
            if time <= since:
                break
        return False


def _like(v: Array, at: Array | slice) -> Array:
    """Give an array over lanes the rank of the entries of an access."""
    return v if isinstance(at, slice) or at.ndim == 1 else v[:, None]


def _get(array: Array, at: Array | slice) -> Array:
    return array[at] if isinstance(at, slice) else np.take(array, at)


def _clashes(array: Array, at: Array | slice, wrote: Array) -> Array | None:
    """Return which of the entries just written hold what another lane wrote, None for none."""
    if isinstance(at, slice):
        return None
    lost = np.asarray(_get(array, at) != wrote)
    return lost if lost.any() else None


def _claim(owner: Array, at: Array | slice, who: Array) -> None:
    """Note who touched entries; what several programs touched becomes -1."""
    held = _get(owner, at)
    new = np.where((held == 0) | (held == who), who, np.int32(-1)) if held.any() else np.broadcast_to(who, held.shape)
    owner[at] = new
    lost = _clashes(owner, at, new)
    if lost is not None:
        owner[at[lost]] = -1  # type: ignore[index]


class Watch:
    """The shadow of one launch. Programs are numbered from 1 here; 0 is nobody, -1 is several."""

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
        self.quiet: dict[tuple[int, ...], bool] = {}
        self.programs: tuple[ProgramChunk | None, Array] = (None, np.zeros(0, np.int32))
        #: Regions with bytes that nobody wrote yet, and their masks.
        self.raw = {
            k: r.initialised for k, r in enumerate(memory.regions)
            if r.initialised is not None and not r.initialised.all()
        }  # fmt: skip
        #: Accesses that read such bytes so far, and whether the kernel's text can read them.
        self.unwritten = 0
        self.may_read_unwritten = bool((self.loaded | self._regions(atomic)) & self.raw.keys())

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
        """Return where an access may go, () when its pointer's origin is unknown."""
        args = op.attrs.get("tensors", ())
        found = self.bounds.get(args)
        if found is None:
            found = self.bounds[args] = tuple(self.memory.extent(a) for a in args)
        return found

    # -- hooks -------------------------------------------------------------------------
    def loading(self, m: ProgramChunk, op: Op, size: int) -> LoadHook | None:
        """Return what to call with the lanes of a load, None when there is nothing to watch."""
        args = op.attrs.get("tensors", ())
        if args:
            if args not in self.quiet:
                self.quiet[args] = not self._regions(frozenset(args)) & (self.watched | self.raw.keys())
            if self.quiet[args]:
                return None
        volatile = bool(op.attrs.get("isVolatile"))

        def hook(k: int, offsets: Array, pick: Pick) -> None:
            if k in self.raw:
                self._uninitialised(m, op, k, offsets, pick, size, "load")
            if k not in self.watched or not offsets.size:
                return
            who = self._who(m, pick, len(offsets))
            self.time += 1
            if volatile and len(offsets) <= _SYNC_LANES * m.programs:
                self.sync.add(self.time, self._place(k, offsets), who)
                return
            self._load(m, op, k, offsets, who, size)

        return hook

    def storing(self, m: ProgramChunk, op: Op, size: int) -> StoreHook:
        """Return what to call with the lanes of a store."""

        def hook(k: int, offsets: Array, values: Array, pick: Pick) -> Callable[[], None] | None:
            if k in self.raw:
                mark(self.raw[k], offsets, size)
            if k not in self.watched:
                return None
            self.time += 1
            return self._store(m, op, k, offsets, values, self._who(m, pick, len(offsets)), size)

        return hook

    def updating(self, m: ProgramChunk, op: Op, k: int, offsets: Array, programs: Array, size: int) -> None:
        """Watch the lanes of an atomic operation; ``programs`` are positions in the chunk."""
        self.time += 1
        who = self._numbers(m)[programs]
        if k in self.raw:
            if op.attrs.get("word") != "exch" or op.used:
                self._uninitialised(m, op, k, offsets, lambda v, _: v[programs], size, "atomic")
            mark(self.raw[k], offsets, size)
        if op.rtypes[0].size <= _SYNC_LANES:
            self.sync.add(self.time, self._place(k, offsets), who)
        shadow = self._shadow(k)
        at = shadow.at(offsets, size)
        a = shadow.arrays
        one = _like(who, at)
        self._check(m, op, k, "write_conflict", "atomic", offsets, size, _get(a["w"], at), one, _get(a["wt"], at),
                    "one of them with an ordinary store, the other one atomically")  # fmt: skip
        self._check(m, op, k, "order_dependent", "atomic", offsets, size, _get(a["r"], at), one, _get(a["rt"], at),
                    "another program loads it", _get(a["rl"], at))  # fmt: skip
        _claim(a["a"], at, one)
        a["al"][at] = one
        a["at"][at] = self.time

    def unwritten_again(self, k: int) -> None:
        """Note that bytes of region ``k`` were overwritten with unwritten values, and that its mask says so."""
        mask = self.memory.regions[k].initialised
        assert mask is not None
        self.raw[k] = mask
        self.quiet.clear()

    # -- races -------------------------------------------------------------------------
    def _load(self, m: ProgramChunk, op: Op, k: int, offsets: Array, who: Array, size: int) -> None:
        shadow = self._shadow(k)
        at = shadow.at(offsets, size)
        a = shadow.arrays
        one = _like(who, at)
        detail = "another program stores to it"
        times = _get(a["wt"], at) if self.timed else None
        self._check(m, op, k, "order_dependent", "load", offsets, size, _get(a["w"], at), one, times, detail)
        if self.timed:
            detail = "another program updates it atomically"
            self._check(m, op, k, "order_dependent", "load", offsets, size, _get(a["a"], at), one, _get(a["at"], at) - 1, detail,
                        _get(a["al"], at))  # fmt: skip
            a["rl"][at] = one
            a["rt"][at] = self.time
        _claim(a["r"], at, one)

    def _store(
        self, m: ProgramChunk, op: Op, k: int, offsets: Array, values: Array, who: Array, size: int
    ) -> Callable[[], None] | None:
        shadow = self._shadow(k)
        at = shadow.at(offsets, size)
        a = shadow.arrays
        one = _like(who, at)
        before = _get(a["w"], at)
        others = one
        if before.any() and (other := (before != 0) & (before != one)).any():
            lane = other if other.ndim == 1 else other.any(axis=1)
            same = self._held(k, offsets, size, values) == bits(values, size)
            differ = _like(lane & ~same, at) & other
            times = _get(a["wt"], at) if self.timed else None
            self._check(m, op, k, "write_conflict", "store", offsets, size, np.where(differ, before, 0), one, times,
                        "the values differ")  # fmt: skip
            if not self.timed:
                # Each of them may load it now: nobody can tell whose value it is.
                others = np.where(other & _like(same, at), -1, one)
        if self.timed:
            self._check(m, op, k, "write_conflict", "store", offsets, size, _get(a["a"], at), one, _get(a["at"], at) - 1,
                        "one of them with an ordinary store, the other one atomically", _get(a["al"], at))  # fmt: skip
            a["wt"][at] = self.time
        if k in self.loaded:
            times, last = (_get(a["rt"], at), _get(a["rl"], at)) if self.timed else (None, None)
            self._check(m, op, k, "order_dependent", "store", offsets, size, _get(a["r"], at), one, times,
                        "another program loads it", last)  # fmt: skip
            a["r"][at] = 0
        a["w"][at] = others
        lost = _clashes(a["w"], at, others)
        if lost is None:
            return None
        # Lanes of several programs in one store: whoever came last won.
        lane = lost if lost.ndim == 1 else lost.any(axis=1)
        a["w"][at[lane]] = -1  # type: ignore[index]

        def after() -> None:
            sub, kept = offsets[lane], values[lane]
            differ = self._held(k, sub, size, kept) != bits(kept, size)
            if differ.any():
                n = int(np.argmax(differ))
                self._found(m, op, k, "write_conflict", "store", int(sub[n]), size, int(who[lane][n]),
                            "the values differ")  # fmt: skip

        return after

    def _check(
        self,
        m: ProgramChunk,
        op: Op,
        k: int,
        kind: str,
        access: str,
        offsets: Array,
        size: int,
        first: Array,
        then: Array,
        times: Array | None,
        detail: str,
        last: Array | None = None,
    ) -> None:
        """Report the first lane whose earlier access, by ``first``, was another program's.

        ``last`` names one program where ``first`` says several; ``times`` are those of the earlier
        access, None where nothing can have synchronised.
        """
        if not first.any():
            return
        # When several programs load what several updated, some of them load what others updated.
        bad = (first != 0) & (first != then if last is None else (first != then) | (then == -1))
        if kind == "order_dependent" and access == "load":
            # Several programs that stored one value may well include the one that loads.
            bad &= first != -1 if last is None else True
        if not bad.any():
            return
        if last is not None:
            # Of several programs only the last is known; if that is this one, nothing can be said.
            bad &= last != then
            first = np.where(first == -1, last, first)
        lanes = np.nonzero(bad)
        chosen = np.broadcast_to(then, bad.shape)[lanes]
        if times is not None:
            known = np.stack([first[lanes], times[lanes], chosen])
            pairs, where = np.unique(known, axis=1, return_index=True)
            for (f, t, q), n in zip(pairs.T.tolist(), where.tolist(), strict=True):
                q = self._someone(m, f) if q < 0 else q
                if f > 0 and not self.sync.ordered(f, t, q):
                    self._found(m, op, k, kind, access, int(offsets[lanes[0][n]]), size, q, detail)
                    return
            return
        if len(chosen):
            q = int(chosen[0])
            q = self._someone(m, int(first[lanes][0])) if q < 0 else q
            self._found(m, op, k, kind, access, int(offsets[lanes[0][0]]), size, q, detail)

    # -- details -----------------------------------------------------------------------
    def _shadow(self, k: int) -> Shadow:
        found = self.shadows.get(k)
        if found is None:
            names = ["w", "r"] + (["wt", "rt", "rl", "a", "at", "al"] if self.timed else [])
            found = self.shadows[k] = Shadow(self.memory.regions[k].data.size, dict.fromkeys(names, np.int32))
        return found

    def _numbers(self, m: ProgramChunk) -> Array:
        if self.programs[0] is not m:
            x, y, z = (p.astype(np.int64) for p in m.pids)
            self.programs = m, (x + m.grid[0] * (y + m.grid[1] * z) + 1).astype(np.int32)
        return self.programs[1]

    def _who(self, m: ProgramChunk, pick: Pick, lanes: int) -> Array:
        """Return the program of each lane, -1 where one lane stands for several."""
        numbers = self._numbers(m)
        if m.programs == 1:
            return np.full(lanes, numbers[0])
        shared = -1 if m.count() > 1 else int(numbers[np.argmax(m.live())])
        return pick(numbers, shared)

    def _someone(self, m: ProgramChunk, but: int) -> int:
        active = self._numbers(m)[m.live()]
        return int(active[np.argmax(active != but)])

    def _place(self, k: int, offsets: Array) -> Array:
        return offsets + self.memory.regions[k].base

    def _held(self, k: int, offsets: Array, size: int, values: Array) -> Array:
        return bits(self.memory.gather(k, offsets, values.dtype), size)

    def _uninitialised(self, m: ProgramChunk, op: Op, k: int, offsets: Array, pick: Pick, size: int, access: str) -> None:
        bad = ~written(self.raw[k], offsets, size)
        if bad.any():
            self.unwritten += 1
            n = int(np.argmax(bad))
            q = int(self._who(m, pick, len(offsets))[n])
            q = self._someone(m, 0) if q < 0 else q
            self._found(m, op, k, "uninitialised_read", access, int(offsets[n]), size, q, "")

    def _found(
        self, m: ProgramChunk, op: Op, k: int, kind: str, access: str, offset: int, size: int, who: int, detail: str
    ) -> None:
        file, line = m.where(op)
        x = who - 1
        program = (x % m.grid[0], x // m.grid[0] % m.grid[1], x // (m.grid[0] * m.grid[1]))
        region = self.memory.regions[k]
        args = op.attrs.get("tensors", ())
        name, first = region.name, region.base
        if len(args) == 1:
            name, first = self.memory.label(args[0]), self.memory.address(args[0])
        index = (region.base + offset - first) // size
        indirect = bool(op.attrs.get("indirect", True))
        self.report(Finding(kind, m.kernel, line, file, program, name, index, 0, detail, access, indirect))
