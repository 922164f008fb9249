"""Programs that wait for one another: each runs on its own until its waiting leads nowhere, then others take their turns.

A GPU runs the programs it has room for together. Here one runs at a time, as a generator that hands over at the back edge of
a waiting loop (``attrs["waits"]``, see liveness.py) once a trip has changed nothing in memory. Where the trip has not
changed the values that the loop carries either, the next one would do the same: the program sleeps until memory changes,
and when all sleep the kernel is deadlocked. Operations without a waiting loop inside run as they always do.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any

import numpy as np

from kbx_env.backends.ttir.errors import Deadlock
from kbx_env.backends.ttir.frontend.graph import Block, Func, Op, Region
from kbx_env.backends.ttir.interp.control import MALFORMED, TERMINATORS, Metered, env_set, trip_counts
from kbx_env.backends.ttir.interp.memory import Array, Extent, Memory

#: Programs that run together at most: 32 for each of the 132 multiprocessors of an H100 or H200. The next one starts when
#: one has ended: waiting for a program that a GPU could not have started is a deadlock here too.
RESIDENT = 132 * 32
#: Trips of waiting loops after which a program hands over although it writes: it may write while it waits.
_PATIENCE = 64

#: Yields whether the program is stuck until memory changes.
Steps = Generator[bool, None, list[Any]]


def _same(a: Array, b: Array) -> bool:
    """Return whether two arrays hold the same bytes."""
    return a is b or (a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes())


class Noticing(Memory):
    """Memory that counts the writes that changed something."""

    def __init__(self, regions: Sequence[Any]) -> None:
        super().__init__(regions)
        self._changes = 0
        self._pending: list[tuple[Array, Array, Array]] = []

    @property
    def changes(self) -> int:
        """A number that grows whenever bytes change."""
        for view, index, held in self._pending:
            self._changes += not _same(view[index], held)
        self._pending = []
        return self._changes

    def _scatter(self, k: int, idx: Array, value: Array) -> None:
        held = self._gather(k, idx, value.dtype)
        super()._scatter(k, idx, value)
        self._changes += not _same(self._gather(k, idx, value.dtype), held)

    def locate(
        self, addr: Array, dtype: np.dtype[Any], within: Sequence[Extent] = ()
    ) -> list[tuple[int, Array, Array, Array]]:
        """Split addresses as ``Memory`` does. Atomic operations ask, and write through the views that they get."""
        groups = super().locate(addr, dtype, within)
        # Reading it settles the operations before this one; what this one changes is known when somebody asks next.
        self._changes = self.changes
        self._pending = [(view, index, view[index]) for _, view, index, _ in groups]
        return groups


class Program(Metered):
    """One program that runs step by step. Its values have a leading axis of length 1, and no mask is needed."""

    memory: Noticing
    #: The waiting loop in which it handed over last.
    at: Op | None = None
    _trips = 0

    def start(self, func: Func, args: list[Any]) -> Steps:
        """Run a function and return its results, handing over whenever waiting leads nowhere."""
        env: list[Any] = [None] * func.slots
        return (yield from self._region(func.body, env, args))

    def deciding(self, op: Op, args: list[Any]) -> None:
        """Called before an operation with a waiting loop inside is run."""

    def leaving(self, op: Op, env: list[Any]) -> None:
        """Called with the terminator of each block that is run here."""

    def _region(self, region: Region, env: list[Any], args: list[Any]) -> Steps:
        blocks = {b.label: b for b in region.blocks}
        block = region.blocks[0]
        env_set(env, block.args, args)
        while True:
            last = yield from self._block(block, env)
            if last is None:
                return []
            if last.name not in ("cf.br", "cf.cond_br"):
                return [env[a] for a in last.args]
            way = 0 if last.name == "cf.br" or env[last.args[0]].all() else 1
            label, passed = last.attrs["targets"][way]
            block = blocks[label]
            env_set(env, block.args, [env[a] for a in passed])

    def _block(self, block: Block, env: list[Any]) -> Generator[bool, None, Op | None]:
        """Run a block and return its terminator, if it has one."""
        self.meter.ran(block, 1)
        for op in block.ops:
            if op.name in TERMINATORS:
                self.leaving(op, env)
                return op
            if "waits" in op.attrs:
                yield from self._control(op, env)
            else:
                self.step(op, env)
        return None

    def _control(self, op: Op, env: list[Any]) -> Generator[bool, None, None]:
        """Run an operation with a waiting loop inside, as ``step`` does with the others."""
        self.meter.ops.add(op.name)
        args = [env[a] for a in op.args]
        self.deciding(op, args)
        try:
            if op.name == "scf.while":
                out = yield from self._while(op, args, env)
            elif op.name == "scf.for":
                out = yield from self._for(op, args, env)
            elif op.name == "scf.if":
                way = 0 if args[0].all() else 1
                out = (yield from self._region(op.regions[way], env, [])) if way < len(op.regions) else []
            elif op.name == "tt.call":
                out = yield from self.start(self.module.funcs[op.attrs["callee"]], args)
            else:
                raise self.unsupported(op, "a waiting loop inside")
            env_set(env, op.results, out)
        except MALFORMED as e:
            raise self.unsupported(op, f"{type(e).__name__}: {e}") from e
        for s in op.dead:
            env[s] = None

    def _for(self, op: Op, args: list[Any], env: list[Any]) -> Steps:
        lo, by, trips = trip_counts(op, args)
        carried = list(args[3:])
        for k in range(int(trips.max())):
            iv = (lo + k * by).astype(args[0].dtype)
            carried = yield from self._region(op.regions[0], env, [iv, *carried])
        return carried

    def _while(self, op: Op, args: list[Any], env: list[Any]) -> Steps:
        before, after = op.regions
        values = list(args)
        while True:
            changes = self.memory.changes
            env_set(env, before.blocks[0].args, values)
            last = yield from self._block(before.blocks[0], env)
            assert last is not None
            outs = [env[a] for a in last.args[1:]]
            if not env[last.args[0]].all():
                return outs
            new = yield from self._region(after, env, outs)
            self._trips += 1
            still = changes == self.memory.changes
            if still or self._trips % _PATIENCE == 0:
                self.at = op
                # What a trip does depends on nothing but memory and the values that the loop carries.
                yield still and all(map(_unchanged, values, new))
            values = new


def _unchanged(a: Any, b: Any) -> bool:
    return a is b or (isinstance(a, np.ndarray) and isinstance(b, np.ndarray) and _same(a, b))


class _Turns:
    """A program that has begun: when to go on with it."""

    def __init__(self, program: Program, steps: Steps) -> None:
        self.program, self.steps = program, steps
        #: The state of memory in which it is stuck, if it is.
        self.stuck: int | None = None

    def on(self) -> bool:
        """Run the program until it hands over or ends; return whether it goes on after that."""
        for stuck in self.steps:
            self.stuck = self.program.memory.changes if stuck else None
            return True
        return False


def take_turns(make: Callable[[int], Program], total: int, args: list[Any], resident: int = RESIDENT) -> None:
    """Run programs in a fixed order until all have ended.

    Args:
        make: Makes the program of a number.
        total: How many there are.
        args: Arguments of the kernel.
        resident: How many may have begun and not ended.

    Raises:
        Deadlock: no program can go on.
    """
    started = 0
    waiting: list[_Turns] = []
    while True:
        moved = False
        kept: list[_Turns] = []
        for turns in waiting:
            if turns.stuck is not None and turns.stuck == turns.program.memory.changes:
                kept.append(turns)
                continue
            moved = True
            if turns.on():
                kept.append(turns)
        while len(kept) < resident and started < total:
            program = make(started)
            started, moved = started + 1, True
            turns = _Turns(program, program.start(program.module.entry, list(args)))
            if turns.on():
                kept.append(turns)
        if not kept:
            return
        if not moved:
            raise _deadlock(kept, total - started)
        # Whether each waits for the next one or for the one before, one of two passes resolves the whole chain.
        waiting = kept[::-1]


def _deadlock(waiting: list[_Turns], unstarted: int) -> Deadlock:
    first = min((t.program for t in waiting), key=lambda p: tuple(p.program(0))[::-1])
    file, line = first.where(first.at) if first.at is not None else ("", 0)
    return Deadlock(first.kernel, line, file, first.program(0), len(waiting), unstarted)
