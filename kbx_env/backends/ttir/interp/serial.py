"""Run programs that wait for one another: each on its own, and another one whenever a program can only wait.

A GPU runs as many programs at once as fit on it. Here one program runs at a time, as a generator. It yields at the back
edge of a waiting loop (``attrs["waits"]``, see liveness.py) once a trip has changed nothing in memory. If the trip has
not changed the values that the loop carries either, the next trip would do the same: the program sleeps until memory
changes. When all programs sleep, the kernel is deadlocked. Operations without a waiting loop inside run as in
``control.Machine``.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any

import numpy as np

from kbx_env.backends.ttir.errors import Deadlock
from kbx_env.backends.ttir.frontend.graph import Block, Func, Op, Region
from kbx_env.backends.ttir.interp.control import MALFORMED, TERMINATORS, MeteredMachine, env_set, trip_counts
from kbx_env.backends.ttir.interp.memory import Array, Extent, Memory

RESIDENT = 132 * 32
"""Largest number of programs that run at once: 32 for each of the 132 multiprocessors of an H100 or H200.

The next one starts when one has ended: waiting for a program that a GPU could not have started is a deadlock here too.
"""
_PATIENCE = 64
"""Trips of waiting loops after which a program yields although memory changes: it may write while it waits."""

Steps = Generator[bool, None, list[Any]]
"""A running program: yields whether it is stuck until memory changes, returns its results."""


class TooManyTurns(Exception):
    """The programs have taken more turns than the caller allowed."""


def _same(a: Array, b: Array) -> bool:
    """Return whether two arrays hold the same bytes."""
    return a is b or (a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes())


class ChangeTrackingMemory(Memory):
    """Memory that counts the writes that changed something.

    Args:
        regions: As for ``Memory``.

    Attributes:
        counting: Whether it counts; nobody needs to know while no program waits.
    """

    def __init__(self, regions: Sequence[Any]) -> None:
        super().__init__(regions)
        self.counting = True
        self._changes = 0
        self._pending: list[tuple[Array, Array, Array]] = []

    @property
    def changes(self) -> int:
        """A number that grows whenever bytes change."""
        for view, index, before in self._pending:
            self._changes += not _same(view[index], before)
        self._pending = []
        return self._changes

    def _scatter(self, k: int, idx: Array, value: Array) -> None:
        if not self.counting:
            super()._scatter(k, idx, value)
            return
        before = self.gather(k, idx, value.dtype)
        super()._scatter(k, idx, value)
        self._changes += not _same(self.gather(k, idx, value.dtype), before)

    def locate(
        self, addr: Array, dtype: np.dtype[Any], within: Sequence[Extent] = ()
    ) -> list[tuple[int, Array, Array, Array]]:
        """Split addresses as ``Memory.locate`` does. Atomic operations write through the views that they get."""
        groups = super().locate(addr, dtype, within)
        if not self.counting:
            return groups
        # The property counts earlier atomic operations; changes by this one are counted when it is read the next time.
        self._changes = self.changes
        self._pending = [(view, index, view[index]) for _, view, index, _ in groups]
        return groups


class ResumableProgram(MeteredMachine):
    """One program that can yield to others. Its values have a leading axis of length 1, and no mask is needed."""

    memory: ChangeTrackingMemory
    at: Op | None = None
    """The waiting loop in which it yielded last."""
    _trips = 0

    def start(self, func: Func, args: list[Any]) -> Steps:
        """Run a function with the values of its arguments and return its results; yields whenever it can only wait."""
        env: list[Any] = [None] * func.slots
        return (yield from self._region(func.body, env, args))

    def check_operands(self, op: Op, args: list[Any]) -> None:
        """Check the operands of an operation with a waiting loop inside, before it runs; see ``TaintMachine``."""

    def check_terminator(self, op: Op, env: list[Any]) -> None:
        """Check the terminator of a block that was run here; see ``TaintMachine``."""

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
        return (yield from self.run_operations(block.ops, env))

    def run_operations(self, ops: Sequence[Op], env: list[Any]) -> Generator[bool, None, Op | None]:
        """Run operations of one block and return the terminator among them; yields whenever it can only wait."""
        for op in ops:
            if op.name in TERMINATORS:
                self.check_terminator(op, env)
                return op
            if "waits" in op.attrs:
                yield from self._control(op, env)
            else:
                self.look_at_clock(1)
                self.step(op, env)
        return None

    def _control(self, op: Op, env: list[Any]) -> Generator[bool, None, None]:
        """Run an operation with a waiting loop inside; ``step`` runs the others."""
        args = [env[a] for a in op.args]
        self.check_operands(op, args)
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
            same_memory = changes == self.memory.changes
            if same_memory or self._trips % _PATIENCE == 0:
                self.at = op
                # A trip depends only on memory and on the values that the loop carries.
                yield same_memory and all(map(_unchanged, values, new))
            values = new


def _unchanged(a: Any, b: Any) -> bool:
    return a is b or (isinstance(a, np.ndarray) and isinstance(b, np.ndarray) and _same(a, b))


class _Started:
    """A program that has started and not ended."""

    def __init__(self, program: ResumableProgram, steps: Generator[bool, None, Any]) -> None:
        self.program, self.steps = program, steps
        self.stuck: int | None = None
        """The count of memory changes at which it got stuck; ``None`` if it is not stuck."""

    def resume(self) -> bool:
        """Run the program until it yields or ends; return whether it has yielded."""
        for stuck in self.steps:
            self.stuck = self.program.memory.changes if stuck else None
            return True
        return False


def run_in_turns(
    make: Callable[[int], tuple[ResumableProgram, Generator[bool, None, Any]]], total: int, resident: int = RESIDENT,
    passes: int | None = None,
) -> None:  # fmt: skip
    """Run programs in a fixed order until all have ended.

    Args:
        make: Returns the program of a number, and its steps.
        total: Number of programs.
        resident: Largest number of programs that have started and not ended.
        passes: Largest number of times that the programs take turns; ``None`` for no limit.

    Raises:
        TooManyTurns: the programs have not ended after ``passes`` turns.
        Deadlock: no program can go on.
    """
    started, turns = 0, 0
    waiting: list[_Started] = []
    while True:
        turns += 1
        if passes is not None and turns > passes:
            raise TooManyTurns
        progress = False
        running: list[_Started] = []
        for one in waiting:
            if one.stuck is not None and one.stuck == one.program.memory.changes:
                running.append(one)
                continue
            progress = True
            if one.resume():
                running.append(one)
        while len(running) < resident and started < total:
            one = _Started(*make(started))
            started, progress = started + 1, True
            if one.resume():
                running.append(one)
        if not running:
            return
        if not progress:
            raise _deadlock(running, total - started)
        # Programs may form a chain in which each waits for its successor, or each for its predecessor. With alternating
        # directions one of two passes resolves the whole chain.
        waiting = running[::-1]


def _deadlock(waiting: list[_Started], unstarted: int) -> Deadlock:
    first = min((s.program for s in waiting), key=lambda p: tuple(p.program(0))[::-1])
    file, line = first.where(first.at) if first.at is not None else ("", 0)
    return Deadlock(first.kernel, line, file, first.program(0), len(waiting), unstarted)
