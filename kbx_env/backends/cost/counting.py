"""A machine that counts the work of some programs; it skips matrix products and most trips of long loops."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kbx_env.backends.ttir.frontend.graph import Func, Op
from kbx_env.backends.ttir.interp.control import Machine, env_set, select
from kbx_env.backends.ttir.interp.memory import Array
from kbx_env.backends.ttir.ops.memory import BlockPointer, block_access, masks

SECTOR = 32
"""Bytes of a sector, the smallest piece that a GPU's caches and DRAM move."""
_TRIPS = 5
"""Largest number of trips of a loop that are run; of longer loops this many trips are a sample."""

_FREE = frozenset(
    "tt.splat tt.broadcast tt.expand_dims tt.reshape tt.trans tt.make_range arith.constant tt.unsplat "
    "tt.get_program_id tt.get_num_programs arith.bitcast tt.bitcast scf.if scf.for scf.while tt.load tt.store "
    "tt.reduce tt.scan tt.dot tt.dot_scaled tt.int_to_ptr tt.ptr_to_int tt.assert llvm.intr.assume".split()
)
"""Operations without arithmetic of their own."""
_COST = {
    "arith.addf": 1, "arith.subf": 1, "arith.mulf": 1, "math.fma": 1, "arith.negf": 0.5, "arith.maxnumf": 1,
    "arith.minnumf": 1, "arith.maximumf": 1, "arith.minimumf": 1, "arith.cmpf": 1, "arith.select": 1,
    "arith.divf": 8, "tt.precise_divf": 16, "math.exp": 2, "math.exp2": 1, "math.log": 14, "math.log2": 12,
    "math.sin": 24, "math.cos": 24, "math.erf": 22, "math.sqrt": 4, "tt.precise_sqrt": 12, "math.rsqrt": 4,
    "math.floor": 2, "math.absf": 0.5, "arith.divsi": 40, "arith.remsi": 40, "arith.divui": 36, "arith.remui": 36,
    "tt.mulhiui": 4, "arith.sitofp": 8, "arith.fptosi": 8, "tt.extern_elementwise": 20,
}  # fmt: skip
"""Cost of other operations per lane, in fp32 operations; 2 where nothing is listed.

Integer and conversion units have half the width on sm_80 and sm_90; a division by a runtime integer is a sequence of
about twenty operations.
"""
_SPECIAL = {
    "arith.divf": 1, "tt.precise_divf": 1, "math.exp": 1, "math.exp2": 1, "math.log": 1, "math.log2": 1,
    "math.sqrt": 1, "tt.precise_sqrt": 1, "math.rsqrt": 1, "math.erf": 1,
}  # fmt: skip
"""Operations of the special function unit per lane."""
_LOADS = {"tt.load", "tt.descriptor_load", "tt.descriptor_gather"}
_STORES = {"tt.store", "tt.descriptor_store"}
_SYNCS = {"tt.reduce", "tt.scan", "tt.dot", "tt.dot_scaled"}
_ATOMICS = {"tt.atomic_rmw", "tt.atomic_cas"}


def _empty() -> defaultdict[str, float]:
    return defaultdict(float)


@dataclass
class Counts:
    """The work of a launch.

    Attributes:
        loaded_bytes: See ``LaunchFacts``.
        stored_bytes: See ``LaunchFacts``.
        loaded: Sectors requested by loads and bytes of the buffer, by name of the buffer.
        stored: The same for stores.
        dot_flops: See ``LaunchFacts``.
        alu: ``LaunchFacts.alu_flops``.
        special: ``LaunchFacts.special_flops``.
        atomics: See ``LaunchFacts``.
        atomic_lines: See ``LaunchFacts``.
        load_rounds: See ``LaunchFacts``.
        syncs: See ``LaunchFacts``.
    """

    loaded_bytes: float = 0
    stored_bytes: float = 0
    loaded: dict[str, tuple[float, int]] = field(default_factory=dict)
    stored: dict[str, tuple[float, int]] = field(default_factory=dict)
    dot_flops: defaultdict[str, float] = field(default_factory=_empty)
    alu: float = 0
    special: float = 0
    atomics: float = 0
    atomic_lines: float = 0
    load_rounds: float = 0
    syncs: float = 0


def _distinct(x: Array) -> int:
    """Count the distinct values of an array (n,); equal neighbours are removed first, as most neighbours are equal."""
    if not x.size:
        return 0
    x = x[np.r_[True, x[1:] != x[:-1]]]
    if (x[1:] > x[:-1]).all():
        return len(x)
    return len(np.unique(x))


def has_dot(op: Op) -> bool:
    """Return whether an operation's regions contain a matrix product: the compiler pipelines such loops."""
    return any(
        inner.name in ("tt.dot", "tt.dot_scaled") or has_dot(inner)
        for r in op.regions
        for b in r.blocks
        for inner in b.ops
    )


class Counter(Machine):
    """Runs sampled programs and counts their work; values that no address depends on may be wrong.

    Args:
        *args: As for ``Machine``.

    Attributes:
        counts: The counts so far, of the sampled programs.
        num_stages: Depth of software pipelines.
        weight: Number of trips that the current trip of a loop stands for, over all loops around it.
        base: Number of load rounds that every later operation comes after.
        ready: Number of load rounds after which a value is there, by slot.
    """

    sees_all = True

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.counts = Counts()
        self.num_stages = 1
        self.weight = 1.0
        self.base = 0.0
        self.ready: dict[int, float] = {}

    def call(self, func: Func, args: list[Any]) -> list[Any]:
        """Run a function with the values of its arguments and return its results; slots are numbered by function."""
        outer, self.ready = self.ready, {}
        try:
            return super().call(func, args)
        finally:
            self.base = max([self.base, *self.ready.values()])
            self.ready = outer

    def finish(self, scale: float) -> Counts:
        """Return the counts of the whole grid, ``scale`` times those of the sample."""
        c = self.counts
        c.load_rounds = self.base
        c.syncs /= max(self.programs, 1)
        c.loaded_bytes *= scale
        c.stored_bytes *= scale
        c.loaded = {k: (s * scale, b) for k, (s, b) in c.loaded.items()}
        c.stored = {k: (s * scale, b) for k, (s, b) in c.stored.items()}
        for k in c.dot_flops:
            c.dot_flops[k] *= scale
        c.alu *= scale
        c.special *= scale
        c.atomics *= scale
        c.atomic_lines *= scale
        return c

    # -- rounds of dependent loads -------------------------------------------------------
    def _mark(self, op: Op) -> None:
        """Set when the results are ready: a loaded value one round after the values that its load depends on."""
        at = max([self.base, *(self.ready.get(a, 0.0) for a in op.args)])
        if op.name in _LOADS or op.name in _ATOMICS and op.used:
            at += 1
        for r in op.results:
            self.ready[r] = at

    # -- work ------------------------------------------------------------------------------
    def step(self, op: Op, env: list[Any]) -> None:
        """Run one operation, reading and writing ``env``, and count it."""
        name = op.name
        if name == "scf.for":
            self._loop(op, env)
            return
        if not op.regions or name in _SYNCS:
            self._mark(op)
        n = self.count() * self.weight
        if name in ("tt.dot", "tt.dot_scaled"):
            self._product(op, env, n)
            return
        c = self.counts
        if name in _LOADS or name in _STORES:
            before = self.meter.loaded_bytes + self.meter.stored_bytes
            self._sectors(op, [env[a] for a in op.args], name in _STORES)
            super().step(op, env)
            moved = (self.meter.loaded_bytes + self.meter.stored_bytes - before) * self.weight
            if name in _STORES:
                c.stored_bytes += moved
            else:
                c.loaded_bytes += moved
            return
        if name in _ATOMICS:
            addr = np.asarray(env[op.args[0]])
            lines = sum(_distinct(row.reshape(-1)) for row in addr) * self.count() / len(addr)
            lanes = self.meter.atomics
            super().step(op, env)
            c.atomics += (self.meter.atomics - lanes) * self.weight
            c.atomic_lines += lines * self.weight
            return
        if name in ("tt.reduce", "tt.scan"):
            inner = sum(len(b.ops) - 1 for r in op.regions for b in r.blocks)
            levels = 1 if name == "tt.reduce" else 5
            c.alu += n * op.types[0].size * inner * levels
            c.syncs += n
        elif name not in _FREE:
            t = (op.rtypes or op.types)[:1]
            size = t[0].size if t else 1
            wide = 2 if t and t[0].elem in ("i64", "f64", "ptr") else 1
            c.alu += n * size * _COST.get(name, 2) * wide
            c.special += n * size * _SPECIAL.get(name, 0)
        super().step(op, env)

    def _product(self, op: Op, env: list[Any], n: float) -> None:
        ta, tb, out = op.types[0], op.types[1], op.rtypes[0]
        precision = op.attrs.get("inputPrecision", "ieee") if ta.elem == "f32" else "ieee"
        kind = f"{ta.elem}*{tb.elem}->{out.elem}" if precision == "ieee" else str(precision)
        inner = ta.shape[-1]
        self.counts.dot_flops[kind] += 2.0 * out.size * inner * n
        self.counts.syncs += n
        # No address depends on a product: the accumulator replaces the result.
        acc = next((env[a] for a in reversed(op.args) if np.shape(env[a])[1:] == out.shape), None)
        env[op.results[0]] = np.zeros((1, *(1,) * len(out.shape)), out.dtype) if acc is None else acc

    def _sectors(self, op: Op, a: list[Any], is_store: bool) -> None:
        if isinstance(a[0], BlockPointer):
            offsets = a[1 : 1 + len(a[0].block.shape)] if op.name.startswith("tt.desc") else a[0].offsets
            placed = BlockPointer(a[0].base, a[0].shape, a[0].strides, list(offsets), a[0].block)
            addr, mask = block_access(placed, list(range(len(placed.block.shape))))
            shape = placed.block.shape
        else:
            addr, shape = a[0], op.types[0].shape
            mask = a[2 if is_store else 1] if len(a) > (2 if is_store else 1) else None
        mask = masks(self, addr, mask)
        rows = max(len(addr), len(mask) if mask is not None else 1)
        line = np.broadcast_to(addr >> 5, (rows, *shape))
        on = None if mask is None else np.broadcast_to(mask, (rows, *shape))
        first, sectors = -1, 0
        for k in range(rows):
            s = line[k].reshape(-1) if on is None else line[k][on[k]]
            if s.size:
                first = int(s[0]) << 5
                sectors += _distinct(s)
        if first < 0:
            return
        at = max(int(np.searchsorted(self.memory.bases, first + SECTOR - 1, "right")) - 1, 0)
        region = self.memory.regions[at]
        by_buffer = self.counts.stored if is_store else self.counts.loaded
        old = by_buffer.get(region.name, (0.0, 0))[0]
        per = self.count() if rows == 1 else 1
        by_buffer[region.name] = (old + sectors * per * self.weight, region.data.size)

    # -- loops -----------------------------------------------------------------------------
    def _loop(self, op: Op, env: list[Any]) -> None:
        lb, ub, step = (env[a] for a in op.args[:3])
        carried = [env[a] for a in op.args[3:]]
        body = op.regions[0]
        lo, hi, by = (v.astype(np.int64) for v in (lb, ub, step))
        by = np.where(by == 0, 1, by)
        trips = np.maximum(-((lo - hi) // by), 0)
        most = int(self.of_active(trips).max(initial=0))
        # The last trip is often partly masked and counts once; the sampled others stand for all the others.
        some = sorted({round(k * (most - 2) / (_TRIPS - 2)) for k in range(_TRIPS - 1)} | {most - 1})
        ks = list(range(most)) if most <= _TRIPS else some
        outer, weight = self.active, self.weight
        # Values that are not ready before a loop are waited for in its first trip, not in every trip.
        start = max([self.base, *self.ready.values()])
        rounds = 0.0
        for k in ks:
            trips_for = 1.0 if k == most - 1 or len(ks) == most else (most - 1) / (len(ks) - 1)
            self.weight = weight * trips_for
            mask = self.live() & (trips > k)
            self.active = None if mask.all() else mask
            for slot, a in zip(body.blocks[0].args[1:], op.args[3:], strict=False):
                self.ready[slot] = self.ready.get(a, 0.0)
            self.base = start
            seen = set(self.ready)
            new = self.run_region(body, env, [(lo + k * by).astype(lb.dtype), *carried])
            depth = max([self.base, *(v for s, v in self.ready.items() if s not in seen)]) - start
            # A pipelined loop loads the data of later trips early: each trip waits for a part of a round.
            rounds += depth * trips_for / (max(self.num_stages, 1) if has_dot(op) else 1)
            for s in set(self.ready) - seen:
                del self.ready[s]
            carried = (
                [select(mask, n, o) for n, o in zip(new, carried, strict=True)] if self.active is not None else new
            )
            self.active = outer
        self.weight = weight
        self.base = start + rounds
        for s in op.results:
            self.ready[s] = self.base
        env_set(env, op.results, carried)
