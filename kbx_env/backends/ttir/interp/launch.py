"""Launch a parsed kernel over a grid, chunk by chunk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kbx_env.backends.ttir.errors import TtirError
from kbx_env.backends.ttir.frontend.graph import Module, Op, Type
from kbx_env.backends.ttir.interp.control import Metered
from kbx_env.backends.ttir.interp.memory import Array, Memory, Meter, Region
from kbx_env.backends.ttir.interp.perturb import Disturbance
from kbx_env.backends.ttir.interp.reorder import reordered
from kbx_env.backends.ttir.interp.serial import Noticing, Program, take_turns
from kbx_env.backends.ttir.interp.slices import annotate
from kbx_env.backends.ttir.ops import arith, math, reduce, tensor  # noqa: F401  (they register)
from kbx_env.backends.ttir.ops.memory import Block
from kbx_env.backends.ttir.sanitizer.sanitizer import Sanitizer
from kbx_env.backends.ttir.sanitizer.unwritten import Wary, WaryProgram

#: Chunks above this many bytes per array leave the processor caches and run slower.
_CACHE_BYTES = 4 << 20


@dataclass(frozen=True)
class Descriptor:
    """A tensor descriptor made by the host: address, shape and strides in elements, padding "zero" or "nan"."""

    base: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    padding: str = ""


class Disturbed(Metered):
    """A machine in which some integers are other ones."""

    disturbance: Disturbance

    def step(self, op: Op, env: list[Any]) -> None:
        """Run one operation, exchanging what goes in or comes out."""
        held = self.disturbance.before(self, op, env)
        super().step(op, env)
        self.disturbance.after(self, op, env, held)


class DisturbedProgram(Disturbed, Program):
    """The same, for a program that may wait for others."""


def _described(v: Descriptor, t: Type) -> Block:
    assert t.pointee
    if len(v.shape) != len(t.pointee.shape) or len(v.strides) != len(v.shape):
        raise TtirError(f"a descriptor of {len(v.shape)} dimensions, expected {len(t.pointee.shape)}")
    one = [[np.array([n], np.int64) for n in part] for part in (v.shape, v.strides)]
    return Block(np.array([v.base], np.int64), one[0], one[1], [], t.pointee, v.padding)


def _places(grid: tuple[int, int, int], first: int, end: int) -> tuple[Array, Array, Array]:
    """Return the coordinates of programs ``first`` to ``end - 1``."""
    ids = np.arange(first, end, dtype=np.int64)
    return (
        (ids % grid[0]).astype(np.int32),
        (ids // grid[0] % grid[1]).astype(np.int32),
        (ids // (grid[0] * grid[1])).astype(np.int32),
    )


def launch(
    module: Module,
    grid: tuple[int, int, int],
    args: Sequence[int | float | Descriptor],
    regions: Sequence[Region],
    meter: Meter,
    *,
    max_bytes: int = 64 << 20,
    deadline: float | None = None,
    sanitizer: Sanitizer | None = None,
    names: Sequence[str] = (),
    disturbance: Disturbance | None = None,
) -> None:
    """Run every program of a grid.

    Args:
        module: Result of ``parse``.
        grid: Number of programs along x, y and z.
        args: Runtime arguments of the public function; pointers are integer addresses. A descriptor stands for
            itself and is followed by its shape and strides, as in the function's signature.
        regions: The memory that the kernel may touch.
        meter: Counters, which the launch increases.
        max_bytes: Bound on the size of one intermediate array (one program may exceed it).
        deadline: Value of ``time.monotonic`` at which to stop.
        sanitizer: Collects faults; with it each access is checked against the tensor that its
            pointer came from instead of all regions.
        names: Names of the runtime arguments, by default those of the regions they point into.
        disturbance: Integers to exchange on the way.

    Raises:
        OutOfBounds: an unmasked access is outside every region, or its tensor.
        DeviceAssert: an assertion of the kernel failed.
        DecidesOnUnwritten: with a sanitizer, memory that nothing has written decides what a program does.
        Deadlock: programs wait for one another, and none can go on.
        Unsupported: the kernel uses an operation that is not implemented.
        TimeoutError: the deadline passed.
    """
    func = module.entry
    entry = func.body.blocks[0]
    if len(args) != len(entry.args):
        raise TtirError(f"{func.name} takes {len(entry.args)} arguments, not {len(args)}")
    values: list[Any] = []
    for v, t in zip(args, entry.arg_types, strict=True):
        if isinstance(v, Descriptor) != (t.elem == "desc"):
            raise TtirError(f"{func.name}: a descriptor where another argument is expected, or the reverse")
        if isinstance(v, Descriptor):
            values.append(_described(v, t))
        elif t.elem == "ptr" or t.dtype.kind in "ib":
            size = t.dtype.itemsize
            bits = np.array(int(v) & ((1 << (8 * size)) - 1), f"u{size}")
            values.append(bits.astype(t.dtype).reshape(1))
        else:
            with np.errstate(over="ignore"):  # a number too large for its type is infinite there
                values.append(np.array(float(v)).astype(t.dtype).reshape(1))
    annotate(module)
    total = grid[0] * grid[1] * grid[2]
    chunk = max(1, min(max_bytes, _CACHE_BYTES) // (8 * module.max_elements))
    memory = Noticing(regions) if module.serial else Memory(regions)
    memory.args, memory.names = list(args), names
    meter.begin(func.name, grid)
    if sanitizer is not None:
        memory.watch = sanitizer.watch(module, memory)
        for found in reordered(module):
            sanitizer.report(found)
    try:
        with np.errstate(all="ignore"):
            wary = memory.watch is not None and memory.watch.may_read_unwritten
            common = memory, meter, deadline
            if isinstance(memory, Noticing):
                one = DisturbedProgram if disturbance is not None else WaryProgram if wary else Program

                def begin(k: int) -> Program:
                    program = one(module, func.name, grid, _places(grid, k, k + 1), *common)
                    if isinstance(program, DisturbedProgram) and disturbance is not None:
                        program.disturbance = disturbance
                    return program

                take_turns(begin, total, values)
                return
            many = Wary if wary else Metered
            for start in range(0, total, chunk):
                pids = _places(grid, start, min(start + chunk, total))
                if disturbance is not None:
                    other = Disturbed(module, func.name, grid, pids, *common)
                    other.disturbance = disturbance
                    other.call(func, list(values))
                else:
                    many(module, func.name, grid, pids, *common).call(func, list(values))
    finally:
        meter.end(memory.label)
