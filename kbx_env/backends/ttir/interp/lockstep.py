"""Run programs that may wait for one another many at once, where that cannot change anything.

``serial.py`` runs each of them on its own, which takes an interpreted step for every operation of every program. Two
kinds of kernels need that for a small part of their text, or not at all.

* Kernels whose loops only draw from counters, as from a queue of work: a loop that adds a constant to a counter in every
  trip, and observes other programs in no other way, ends without them. All programs run together throughout.
* Kernels that wait in one place, as at a barrier of the whole grid or for a lock: everything from the first operation
  that observes other programs to the last one runs in turns, as in ``serial.py``; what comes before it and after it runs
  together.

Either way it is an attempt: ``ConflictWatch`` gives up at the first doubt, and every other error ends the attempt too.
Then memory is as before, and the programs run one by one. So faults are reported as ``serial.py`` finds them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from kbx_env.backends.ttir.errors import TtirError
from kbx_env.backends.ttir.frontend.graph import Block, Func, Module, Op
from kbx_env.backends.ttir.interp.control import TERMINATORS, MeteredMachine, env_set, part
from kbx_env.backends.ttir.interp.hooks import Extent, Pick, StoreHook
from kbx_env.backends.ttir.interp.liveness import nested_uses, observes, observing_functions, operations
from kbx_env.backends.ttir.interp.memory import Array, Meter, Region
from kbx_env.backends.ttir.interp.programs import ELEMENT_BYTES, Launch
from kbx_env.backends.ttir.interp.serial import ChangeTrackingMemory, ResumableProgram, TooManyTurns, run_in_turns
from kbx_env.backends.ttir.interp.slices import ATOMICS, LOADS, STORES
from kbx_env.backends.ttir.sanitizer.conflicts import TURNS, ConflictWatch, GaveUp
from kbx_env.backends.ttir.sanitizer.sanitizer import SYNC_LANES

_BLOCK = 14
"""Binary logarithm of the size of the blocks of memory that are copied before they are written to."""
_KEPT_BYTES = 1 << 30
"""Largest sum of the sizes of these copies."""
_MAX_PROGRAMS = 8192
"""Largest number of programs that may take turns: which of them have synchronised is kept for each pair."""
_SHARE = 0.25
"""Part of the time that is left which an attempt may take: the programs may have to run one by one after it."""
_PASSES = 64
"""Number of turns after which an attempt ends: some programs may wait for others that wait here for the end of the turns."""


@dataclass(frozen=True)
class Plan:
    """How to run the programs of a kernel together.

    Attributes:
        turns: Positions of the first operation of the entry block that runs in turns, and of the first one behind them;
            ``None`` if all run together.
    """

    turns: tuple[int, int] | None


# -- which kernels -------------------------------------------------------------------------
def plan(module: Module) -> Plan | None:
    """Return how to run the programs of an annotated module together, ``None`` if its text does not allow that."""
    memo = vars(module)
    if "_plan" not in memo:
        memo["_plan"] = _plan(module)
    found: Plan | None = memo["_plan"]
    return found


def _plan(module: Module) -> Plan | None:
    observing = observing_functions(module)
    if all(_only_draws(func, observing) for func in module.funcs.values()):
        return Plan(None)
    if len(module.entry.body.blocks) != 1:
        return None
    block = module.entry.body.blocks[0]
    waits = [k for k, op in enumerate(block.ops) if any(map(_synchronises, _within(module, op)))]
    if not waits:
        return None
    first, end = waits[0], waits[-1] + 1
    in_turns = [inner for op in block.ops[first:end] for inner in _within(module, op)]
    others = [inner for op in block.ops[:first] + block.ops[end:] for inner in _within(module, op)]
    # An attempt that fails must not take long, and one that succeeds must save something.
    short = len(in_turns) <= len(others) and not any(_works_in_loop(module, op) for op in in_turns)
    return Plan((first, end)) if short else None


def _works_in_loop(module: Module, op: Op) -> bool:
    """Return whether an operation is a loop that does more than wait."""
    if op.name not in ("scf.for", "scf.while"):
        return False
    inner = [o for o in _within(module, op) if o.name in LOADS or o.name in STORES]
    return op.name == "scf.for" or not all(map(_synchronises, inner))


def _within(module: Module, op: Op) -> Iterator[Op]:
    """Yield an operation, those inside it, and those of the functions that they call."""
    seen: set[str] = set()
    todo = [op]
    while todo:
        one = todo.pop()
        yield one
        for region in one.regions:
            todo += operations(region)
        callee = one.attrs.get("callee")
        if callee in module.funcs and callee not in seen:
            seen.add(callee)
            todo += operations(module.funcs[callee].body)


def _synchronises(op: Op) -> bool:
    """Return whether an operation may wait, or synchronises programs for the sanitizer."""
    small = op.name in LOADS and bool(op.attrs.get("isVolatile")) and op.rtypes[0].size <= SYNC_LANES
    return small or op.name in ATOMICS or "waits" in op.attrs


def _only_draws(func: Func, observing: set[str]) -> bool:
    """Return whether every loop of a function that observes other programs only draws from counters."""
    constants = {op.results[0]: op.attrs["value"] for op in operations(func.body) if op.name == "arith.constant"}

    def draws(op: Op) -> bool:
        if op.name != "tt.atomic_rmw" or op.attrs["word"] != "add" or op.rtypes[0].size != 1:
            return False
        amount, mask = (constants.get(slot) for slot in (op.args[1], op.args[-1]))
        return amount is not None and bool(np.all(amount)) and (len(op.args) < 3 or (mask is not None and mask.all()))

    for loop in operations(func.body):
        if loop.name != "scf.while":
            continue
        looks = [op for r in loop.regions for op in operations(r) if observes(op, observing)]
        in_every_trip = [op for r in loop.regions for op in r.blocks[0].ops if draws(op)]
        if looks and not (in_every_trip and all(map(draws, looks))):
            return False
    return True


# -- the attempt ---------------------------------------------------------------------------
def run_together(started: Launch) -> bool:
    """Try to run the programs of a launch together.

    Args:
        started: The launch. Its kernel may wait; its memory and meter are as at its beginning.

    Returns:
        Whether the launch is done. If not, everything is as before.
    """
    module = started.module
    how = plan(module) if module.together else None
    if how is None or started.total == 1 or not _fits(started, how):
        return False
    memory = _UndoableMemory(_regions(started))
    memory.args, memory.names, memory.stray = started.memory.args, started.memory.names, started.memory.stray
    memory.counting = False
    memory.watch = watch = ConflictWatch(module, memory, started.total)
    now = time.process_time()
    trial = replace(
        started, memory=memory, meter=Meter(detail=started.meter.detail), taint=False,
        deadline=None if started.deadline is None else now + _SHARE * (started.deadline - now),
    )  # fmt: skip
    trial.meter.begin(module.entry.name, started.grid)
    changes = started.perturbation
    before = (changes.touched, dict(changes.seen or {})) if changes is not None else None
    try:
        if how.turns is None:
            order = _shuffled(started.total)
            for ids in trial.chunks():
                trial.machine(order[ids]).call(module.entry, list(trial.values))
        else:
            _run_in_phases(trial, memory, watch, how.turns)
    except (GaveUp, TooManyTurns, TtirError, TimeoutError, MemoryError):
        memory.undo()
        if changes is not None and before is not None:
            changes.touched = before[0]
            if changes.seen is not None:
                changes.seen.clear()
                changes.seen.update(before[1])
        module.together = False
        return False
    started.meter.adopt(trial.meter)
    return True


def _fits(started: Launch, how: Plan) -> bool:
    """Return whether what the programs know can be kept at once while they take turns."""
    size = started.total * started.module.max_elements * ELEMENT_BYTES
    return how.turns is None or (started.total <= _MAX_PROGRAMS and size <= started.max_bytes)


def _shuffled(total: int) -> Array:
    """Return the numbers of all programs in a fixed order in which none has its own place.

    Programs draw from a counter in this order. In the order of their numbers, each would draw its own number first, and
    never meet what another program should have prepared for it.
    """
    rng = np.random.default_rng(total)
    order = own = np.arange(total)
    while (order == own).any():
        order = rng.permutation(total)
    return order


def _regions(started: Launch) -> list[Region]:
    """Return the regions of a launch; without a sanitizer nobody asks which bytes were written."""
    regions = started.memory.all_regions
    return regions if started.memory.watch is not None else [replace(r, initialised=None) for r in regions]


class _UndoableMemory(ChangeTrackingMemory):
    """Memory that keeps copies of the blocks that are written to, with their flags.

    Args:
        regions: As for ``Memory``.
    """

    def __init__(self, regions: Sequence[Region]) -> None:
        super().__init__(regions)
        self._kept = [np.zeros((r.data.size >> _BLOCK) + 1, bool) for r in self.regions]
        self._copies: list[tuple[Array, slice, Array]] = []
        self._bytes = 0

    def undo(self) -> None:
        """Write the copies back."""
        for whole, where, copy in self._copies:
            whole[where] = copy

    def store(
        self, addr: Array, value: Array, mask: Array | None, within: Sequence[Extent] = (), hook: StoreHook | None = None
    ) -> None:  # fmt: skip
        """Write one element per lane, as ``Memory.store`` does."""

        def keeping(k: int, offsets: Array, values: Array, pick: Pick) -> Callable[[], None] | None:
            self._keep(k, offsets, values.dtype.itemsize)
            return hook(k, offsets, values, pick) if hook is not None else None

        super().store(addr, value, mask, within, keeping)

    def _mark_stored(self, k: int, idx: Array, size: int) -> None:
        # Of an atomic operation, this is the first that is told.
        self._keep(k, idx.reshape(-1), size)
        super()._mark_stored(k, idx, size)

    def _keep(self, k: int, offsets: Array, size: int) -> None:
        """Copy the blocks that elements of ``size`` bytes lie in, unless there are copies of them."""
        region, kept = self.regions[k], self._kept[k]
        for blocks in (offsets >> _BLOCK, (offsets + (size - 1)) >> _BLOCK):
            for block in np.unique(blocks[~kept[blocks]]).tolist():
                kept[block] = True
                where = slice(block << _BLOCK, (block + 1) << _BLOCK)
                for whole in (region.data, region.initialised, region.stored):
                    if whole is not None:
                        self._copies.append((whole, where, whole[where].copy()))
                        self._bytes += self._copies[-1][2].nbytes
        if self._bytes > _KEPT_BYTES:
            raise GaveUp("too many writes")


def _run_in_phases(trial: Launch, memory: ChangeTrackingMemory, watch: ConflictWatch, turns: tuple[int, int]) -> None:
    """Run programs together, then in turns, then together again; ``turns`` bounds the operations that run in turns."""
    func = trial.module.entry
    block = func.body.blocks[0]
    first, end = turns
    chunks: list[tuple[MeteredMachine, list[Any]]] = []
    for ids in trial.chunks():
        machine, env = trial.machine(ids), [None] * func.slots
        env_set(env, block.args, trial.values)
        trial.meter.ran(block, machine.count())
        _steps(machine, block.ops[:first], env)
        chunks.append((machine, env))
    watch.phase, memory.counting = TURNS, True
    _take_turns(trial, block, turns, chunks)
    watch.begin_after()
    memory.counting = False
    for machine, env in chunks:
        _steps(machine, block.ops[end:], env)


def _steps(machine: MeteredMachine, ops: Sequence[Op], env: list[Any]) -> None:
    for op in ops:
        if op.name not in TERMINATORS:
            machine.look_at_clock(1)
            machine.step(op, env)


def _take_turns(
    trial: Launch, block: Block, turns: tuple[int, int], chunks: Sequence[tuple[MeteredMachine, list[Any]]]
) -> None:
    """Run the operations between ``turns`` in turns, with the values in ``chunks``, and put their results there."""
    ops = block.ops[turns[0] : turns[1]]
    made = [r for op in ops for r in op.results]
    needed = sorted(set().union(*map(nested_uses, ops)).difference(made))
    chunk = chunks[0][0].programs
    envs: list[list[Any]] = []

    def make(k: int) -> tuple[ResumableProgram, Generator[bool, None, Op | None]]:
        whole = chunks[k // chunk][1]
        env: list[Any] = [None] * len(whole)
        for slot in needed:
            # A value that is made inside an operation is not there yet.
            env[slot] = None if whole[slot] is None else part(whole[slot], k % chunk)
        envs.append(env)
        program = trial.program(k)
        return program, program.run_operations(ops, env)

    run_in_turns(make, trial.total, passes=_PASSES)
    for c, (machine, whole) in enumerate(chunks):
        rows = envs[c * chunk : c * chunk + machine.programs]
        for slot in made:
            whole[slot] = _joined([env[slot] for env in rows])
        for slot in (s for op in ops for s in op.dead):
            whole[slot] = None


def _joined(values: Sequence[Any]) -> Any:
    """Return the value of all programs of a chunk, given that of each; ``None`` if it is no longer needed."""
    if all(v is None for v in values):
        return None
    if not all(isinstance(v, np.ndarray) for v in values):
        raise GaveUp("a pointer to a block")
    shape = np.broadcast_shapes(*(v.shape[1:] for v in values))
    return np.concatenate([np.broadcast_to(v, (1, *shape)) for v in values])
