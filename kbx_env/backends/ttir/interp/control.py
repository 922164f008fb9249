"""The interpreter: runs blocks, functions and structured control flow for a chunk of programs."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple

import numpy as np

from kbx_env.backends.ttir.errors import Unsupported
from kbx_env.backends.ttir.frontend.graph import Block, Func, Module, Op, Region
from kbx_env.backends.ttir.frontend.locs import resolve
from kbx_env.backends.ttir.interp.memory import Array, Memory, Meter

Handler = Callable[["Machine", Op, list[Any]], Any]
"""Executes an operation: called with the machine, the operation and the values of its operands, returns its results."""
OPS: dict[str, Handler] = {}
"""Handlers by name of the operation."""
CLOCK_STEPS = 32
"""Operations between two looks at the clock: reading a process's CPU time takes as long as a small operation."""
PURE = ("arith.", "math.", "tt.splat", "tt.broadcast", "tt.expand_dims", "tt.reshape", "tt.addptr", "tt.split", "tt.join")
"""Beginnings of the names of operations that read no memory."""
MALFORMED = (ValueError, TypeError, IndexError, KeyError, AttributeError, AssertionError)
"""Exceptions of a handler that meets a variant of its operation that it does not implement."""


def register(*names: str) -> Callable[[Handler], Handler]:
    """Return a decorator that makes a function the handler of the operations ``names``."""

    def wrap(f: Handler) -> Handler:
        for n in names:
            OPS[n] = f
        return f

    return wrap


class Step(NamedTuple):
    """What running one operation takes, looked up once."""

    op: Op
    handler: Handler | None
    """``None`` if ``Machine.step`` must run the operation: it has regions or several results, or there is no handler."""
    args: tuple[int, ...]
    result: int
    """Slot of the result, -1 for none."""
    dead: tuple[int, ...]
    reads: bool
    """Whether it may read memory."""


def may_read(op: Op) -> bool:
    """Return whether an operation may read memory."""
    return not op.name.startswith(PURE)


def _step_of(op: Op) -> Step:
    plain = op.name not in _CONTROL and not op.regions and len(op.results) < 2
    result = op.results[0] if op.results else -1
    return Step(op, OPS.get(op.name) if plain else None, tuple(op.args), result, tuple(op.dead), may_read(op))


def _code(block: Block) -> tuple[list[list[Step]], Op]:
    """Return the operations of a block in groups of ``CLOCK_STEPS``, and its terminator."""
    ends = block.ops[-1].name in TERMINATORS
    steps = [_step_of(op) for op in (block.ops[:-1] if ends else block.ops)]
    groups = [steps[k : k + CLOCK_STEPS] for k in range(0, len(steps), CLOCK_STEPS)]
    return groups, block.ops[-1] if ends else _END


def lift(mask: Array, rank: int) -> Array:
    """Append axes of length 1 to a mask over programs, up to ``rank`` axes."""
    return mask.reshape(mask.shape + (1,) * (rank - 1))


def select(mask: Array, new: Any, old: Any) -> Any:
    """Take one value for some programs and another one for the others.

    Args:
        mask: The programs that take ``new``: bool, (programs,).
        new: An array, a block pointer or a descriptor.
        old: The same; ``None`` for a value that does not exist yet.

    Returns:
        The combined value.
    """
    if new is old or old is None:
        return new
    if isinstance(new, np.ndarray):
        return np.where(lift(mask, new.ndim), new, old)
    if is_dataclass(new) and not isinstance(new, type):
        parts: dict[str, Any] = {}
        for f in fields(new):
            a, b = getattr(new, f.name), getattr(old, f.name)
            if isinstance(a, (list, tuple)) and a and isinstance(a[0], np.ndarray):
                parts[f.name] = [select(mask, x, y) for x, y in zip(a, b, strict=True)]
            else:
                parts[f.name] = select(mask, a, b) if isinstance(a, np.ndarray) else a
        return type(new)(**parts)
    return new


def part(value: Any, k: int) -> Any:
    """Return the value of one program.

    Args:
        value: An array, a block pointer or a descriptor, for all programs of a chunk.
        k: Position of the program in the chunk.

    Returns:
        The same with a leading axis of length 1.
    """
    if isinstance(value, np.ndarray):
        return value if len(value) == 1 else value[k : k + 1]
    if is_dataclass(value) and not isinstance(value, type):
        parts: dict[str, Any] = {}
        for f in fields(value):
            a = getattr(value, f.name)
            arrays = isinstance(a, (list, tuple)) and a and isinstance(a[0], np.ndarray)
            parts[f.name] = [part(x, k) for x in a] if arrays else part(a, k) if isinstance(a, np.ndarray) else a
        return type(value)(**parts)
    return value


class Machine:
    """State of one chunk of programs.

    A value is an array with a leading program axis, which has length 1 when every program holds
    the same value; any tensor axis may likewise have length 1 in place of its true length.

    Args:
        module: The module of the kernel.
        kernel: Its name.
        grid: Number of programs along x, y and z.
        pids: Coordinates of the chunk's programs along x, y and z: int32, (programs,) each.
        memory: The memory of the launch.
        meter: Counters, which the machine increases.
        deadline: Value of ``time.process_time`` at which to stop; ``None`` for no limit. A loaded machine must not make a
            kernel late.

    Attributes:
        programs: Number of programs in the chunk.
        active: Mask of the programs that run now: bool, (programs,); ``None`` for all.
        env: Values by slot of the block around the operation with regions that runs now.
        sees_all: Whether ``step`` must run every operation, because a subclass looks at each.
        sees_reads: Whether ``step`` must run every operation that may read memory.
    """

    sees_all = False
    sees_reads = False

    def __init__(
        self,
        module: Module,
        kernel: str,
        grid: tuple[int, int, int],
        pids: tuple[Array, Array, Array],
        memory: Memory,
        meter: Meter,
        deadline: float | None,
    ) -> None:
        self.module, self.kernel, self.grid, self.pids = module, kernel, grid, pids
        self.memory, self.meter, self.deadline = memory, meter, deadline
        self.programs = len(pids[0])
        self.active: Array | None = None
        self.env: list[Any] = []
        self._steps = 0

    # -- errors ------------------------------------------------------------------------
    def where(self, op: Op) -> tuple[str, int]:
        """Return the source file and line of an operation."""
        return resolve(self.module.locs, op.loc)

    def unsupported(self, op: Op, detail: str = "") -> Unsupported:
        """Build the error for an operation that cannot be executed."""
        file, line = self.where(op)
        return Unsupported(op.name, line, file, detail)

    def program(self, k: int) -> tuple[int, int, int]:
        """Return the coordinates of the k-th program of the chunk."""
        x, y, z = (int(p[k]) for p in self.pids)
        return x, y, z

    # -- masks -------------------------------------------------------------------------
    def live(self) -> Array:
        """Return the mask of active programs."""
        return np.ones(self.programs, bool) if self.active is None else self.active

    def count(self) -> int:
        """Return the number of active programs."""
        return self.programs if self.active is None else int(np.count_nonzero(self.active))

    def merge(self, mask: Array, new: Any, old: Any) -> Any:
        """Join the values of two control flow paths; ``mask`` marks the programs that took the ``new`` one."""
        return select(mask, new, old)

    def of_active(self, v: Array) -> Array:
        """Return the rows of an array (programs or 1, ...) that belong to active programs."""
        return v if self.active is None or len(v) == 1 else v[self.active]

    # -- execution ---------------------------------------------------------------------
    def call(self, func: Func, args: list[Any]) -> list[Any]:
        """Run a function with the values of its arguments and return its results."""
        env: list[Any] = [None] * func.slots
        return self.run_region(func.body, env, args)

    def run_region(self, region: Region, env: list[Any], args: list[Any]) -> list[Any]:
        """Run the blocks of a region.

        Args:
            region: The region.
            env: Values by slot, which the region's operations read and set.
            args: Values of the arguments of its first block.

        Returns:
            The operands of its terminator.
        """
        first = region.blocks[0]
        env_set(env, first.args, args)
        if len(region.blocks) == 1:
            last = self.run_block(first, env)
            return [env[a] for a in last.args]
        return self.run_graph(region, env)

    def run_graph(self, region: Region, env: list[Any]) -> list[Any]:
        """Run a region of several blocks, each block once for all the programs that reach it.

        Args:
            region: The region.
            env: Values by slot, those of the first block's arguments included.

        Returns:
            The operands of its terminator.

        Raises:
            Unsupported: programs that took different paths would enter a loop.
        """
        index = {b.label: k for k, b in enumerate(region.blocks)}
        outer = self.active
        waiting: dict[int, Array] = {0: self.live()}
        results: list[Any] | None = None
        while waiting:
            k = min(waiting)
            mask = waiting.pop(k)
            self.active = None if mask.all() else mask
            block = region.blocks[k]
            last = self.run_block(block, env)
            if last.name == "scf.yield" or last.name.endswith("return"):
                out = [env[a] for a in last.args]
                results = (
                    out if results is None else [self.merge(mask, n, o) for n, o in zip(out, results, strict=True)]
                )
                continue
            if last.name == "cf.br":
                edges = [(last.attrs["targets"][0], mask)]
            elif last.name == "cf.cond_br":
                cond = np.broadcast_to(env[last.args[0]], mask.shape)
                yes, no = last.attrs["targets"]
                edges = [(yes, mask & cond), (no, mask & ~cond)]
            else:
                raise self.unsupported(last)
            # Read every operand before a block argument is overwritten.
            moves = [(index[t], [env[a] for a in vals], m) for (t, vals), m in edges if m.any()]
            for to, vals, m in moves:
                if to <= k and (waiting or len(moves) > 1):
                    raise self.unsupported(last, "divergent backward branch")
                slots = region.blocks[to].args
                if to in waiting:
                    vals = [self.merge(m, v, env[s]) for v, s in zip(vals, slots, strict=True)]
                    waiting[to] = waiting[to] | m
                else:
                    waiting[to] = m
                env_set(env, slots, vals)
        self.active = outer
        return results or []

    def run_block(self, block: Block, env: list[Any]) -> Op:
        """Run a block up to its terminator and return the terminator."""
        if block.code is None:
            block.code = _code(block)
        groups, last = block.code
        sees_reads = self.sees_reads
        for group in groups:
            self.look_at_clock(len(group))
            for op, handler, slots, result, dead, reads in group:
                if handler is None or self.sees_all or (reads and sees_reads):
                    self.step(op, env)
                    continue
                try:
                    out = handler(self, op, [env[a] for a in slots])
                except MALFORMED as e:
                    raise self.unsupported(op, f"{type(e).__name__}: {e}") from e
                if result >= 0:
                    env[result] = out[0] if isinstance(out, (list, tuple)) else out
                for s in dead:
                    env[s] = None
        return last

    def look_at_clock(self, steps: int) -> None:
        """Count steps, and look at the clock once in ``CLOCK_STEPS`` of them."""
        self._steps -= steps
        if self._steps < 0:
            self._steps = CLOCK_STEPS
            if self.deadline is not None and time.process_time() > self.deadline:
                raise TimeoutError(f"{self.kernel}: the deadline passed")

    def step(self, op: Op, env: list[Any]) -> None:
        """Run one operation: read its operands from ``env``, set its results there, and drop dead values.

        Args:
            op: The operation.
            env: Values by slot.

        Raises:
            Unsupported: there is no handler, or not for this variant of the operation.
            TimeoutError: the deadline passed.
        """
        handler = op.run
        if handler is None:
            handler = _CONTROL.get(op.name) or OPS.get(op.name)
            if handler is None:
                raise self.unsupported(op)
            op.run = handler
        args = [env[a] for a in op.args]
        if op.regions:
            self.env = env
        try:
            out = handler(self, op, args, env) if op.name in _CONTROL else handler(self, op, args)
        except MALFORMED as e:
            raise self.unsupported(op, f"{type(e).__name__}: {e}") from e
        if op.results:
            if len(op.results) == 1 and not isinstance(out, (tuple, list)):
                env[op.results[0]] = out
            else:
                env_set(env, op.results, out)
        for s in op.dead:
            env[s] = None


class MeteredMachine(Machine):
    """A machine that reports the runs of each block to its meter; combine regions of reductions are not reported."""

    def run_block(self, block: Block, env: list[Any]) -> Op:
        """Count the run of a block and run it."""
        self.meter.ran(block, self.count())
        return super().run_block(block, env)


def env_set(env: list[Any], slots: list[int], values: Any) -> None:
    """Assign values to slots of an environment."""
    for s, v in zip(slots, values, strict=True):
        env[s] = v


TERMINATORS = {
    "tt.return", "scf.yield", "scf.condition", "cf.br", "cf.cond_br",
    "tt.reduce.return", "tt.scan.return", "tt.map_elementwise.return", "ub.unreachable",
}  # fmt: skip
"""Operations that end a block."""
_END = Op("scf.yield", [], [], [], [])
"""Stands for the terminator of a block without one."""


def _if(m: Machine, op: Op, args: list[Any], env: list[Any]) -> list[Any]:
    cond = args[0]
    conditions = m.of_active(cond)
    outer = m.active
    if conditions.all():
        return m.run_region(op.regions[0], env, [])
    otherwise = op.regions[1] if len(op.regions) > 1 else None
    if not conditions.any():
        return m.run_region(otherwise, env, []) if otherwise else []
    live = m.live()
    yes, no = live & cond, live & ~cond
    m.active = yes
    a = m.run_region(op.regions[0], env, [])
    b: list[Any] = []
    if otherwise:
        m.active = no
        b = m.run_region(otherwise, env, [])
    m.active = outer
    return [m.merge(yes, x, y) for x, y in zip(a, b, strict=True)]


def trip_counts(op: Op, args: list[Any]) -> tuple[Array, Array, Array]:
    """Return the lower bound, the step and the number of trips of a counted loop.

    Args:
        op: The loop.
        args: Its operands: lower bound, upper bound, step, and more.

    Returns:
        Three arrays: int64, (programs or 1,).
    """
    lb, ub, step = args[:3]
    lo, hi, by = (v.astype(np.int64) for v in (lb, ub, step))
    if op.attrs["unsigned"]:
        lo, hi, by = (v & ((1 << (8 * lb.dtype.itemsize)) - 1) for v in (lo, hi, by))
    by = np.where(by == 0, 1, by)
    return lo, by, np.maximum(-((lo - hi) // by), 0)


def _for(m: Machine, op: Op, args: list[Any], env: list[Any]) -> list[Any]:
    lo, by, trips = trip_counts(op, args)
    dtype = args[0].dtype
    carried = list(args[3:])
    body = op.regions[0]
    active_trips = m.of_active(trips)
    if not active_trips.size:
        return carried
    most, least = int(active_trips.max()), int(active_trips.min())
    outer = m.active
    for k in range(most):
        iv = (lo + k * by).astype(dtype)
        if k < least:
            carried = m.run_region(body, env, [iv, *carried])
            continue
        mask = m.live() & (trips > k)
        m.active = mask
        new = m.run_region(body, env, [iv, *carried])
        carried = [m.merge(mask, n, o) for n, o in zip(new, carried, strict=True)]
        m.active = outer
    return carried


def _while(m: Machine, op: Op, args: list[Any], env: list[Any]) -> list[Any]:
    outer = m.active
    mask = m.live()
    values = list(args)
    results: list[Any] | None = None
    before, after = op.regions
    while True:
        env_set(env, before.blocks[0].args, values)
        last = m.run_block(before.blocks[0], env)
        cond = np.broadcast_to(env[last.args[0]], mask.shape) & mask
        outs = [env[a] for a in last.args[1:]]
        done = mask & ~cond
        if results is None:
            results = outs
        elif done.any():
            results = [m.merge(done, n, o) for n, o in zip(outs, results, strict=True)]
        if not cond.any():
            break
        m.active = None if cond.all() else cond
        new = m.run_region(after, env, outs)
        values = new if (cond == mask).all() else [m.merge(cond, n, v) for n, v in zip(new, values, strict=True)]
        mask = cond
    m.active = outer
    return results


def _call(m: Machine, op: Op, args: list[Any]) -> list[Any]:
    func = m.module.funcs.get(op.attrs["callee"])
    if func is None:
        raise m.unsupported(op, op.attrs["callee"])
    return m.call(func, args)


_CONTROL: dict[str, Any] = {"scf.if": _if, "scf.for": _for, "scf.while": _while}
OPS["tt.call"] = _call
