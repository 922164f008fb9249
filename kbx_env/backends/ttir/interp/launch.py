"""Launch a parsed kernel over a grid, chunk by chunk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kbx_env.backends.ttir.errors import TtirError
from kbx_env.backends.ttir.frontend.graph import Module, Type
from kbx_env.backends.ttir.interp.lockstep import run_together
from kbx_env.backends.ttir.interp.memory import Array, Memory, Meter, Region
from kbx_env.backends.ttir.interp.perturb import Perturbation
from kbx_env.backends.ttir.interp.programs import Launch
from kbx_env.backends.ttir.interp.serial import (
    RESIDENT,
    ChangeTrackingMemory,
    ResumableProgram,
    Steps,
    run_in_turns,
)
from kbx_env.backends.ttir.interp.slices import annotate
from kbx_env.backends.ttir.ops import arith, dot, math, reduce, tensor  # noqa: F401  (they register)
from kbx_env.backends.ttir.ops.memory import BlockPointer
from kbx_env.backends.ttir.sanitizer.reorder import reordered
from kbx_env.backends.ttir.sanitizer.sanitizer import Sanitizer

FORWARDS, BACKWARDS = "forwards", "backwards"
"""Orders in which programs run one after the other."""


@dataclass(frozen=True)
class Descriptor:
    """A tensor descriptor made by the host: address, shape and strides in elements, padding "zero" or "nan"."""

    base: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    padding: str = ""


def scalar_argument(v: int | float, t: Type) -> Array:
    """Return a runtime argument as the kernel sees it.

    Args:
        v: The number; addresses are integers.
        t: Type of the parameter. Integers wrap around to its width.

    Returns:
        An array of shape (1,) and the type's dtype.
    """
    if t.elem == "ptr" or t.dtype.kind in "ib":
        size = t.dtype.itemsize
        bits = np.array(int(v) & ((1 << (8 * size)) - 1), f"u{size}")
        return bits.astype(t.dtype).reshape(1)
    with np.errstate(over="ignore"):  # a number too large for its type becomes infinite, as on the device
        return np.array(float(v)).astype(t.dtype).reshape(1)


def _descriptor_argument(v: Descriptor, t: Type) -> BlockPointer:
    assert t.pointee
    if len(v.shape) != len(t.pointee.shape) or len(v.strides) != len(v.shape):
        raise TtirError(f"a descriptor of {len(v.shape)} dimensions, expected {len(t.pointee.shape)}")
    shape, strides = ([np.array([n], np.int64) for n in part] for part in (v.shape, v.strides))
    return BlockPointer(np.array([v.base], np.int64), shape, strides, [], t.pointee, v.padding)


def _arguments(module: Module, args: Sequence[int | float | Descriptor]) -> list[Any]:
    """Convert the arguments of a launch to values of the interpreter."""
    func = module.entry
    entry = func.body.blocks[0]
    if len(args) != len(entry.args):
        raise TtirError(f"{func.name} takes {len(entry.args)} arguments, not {len(args)}")
    values: list[Any] = []
    for v, t in zip(args, entry.arg_types, strict=True):
        if isinstance(v, Descriptor) != (t.elem == "desc"):
            raise TtirError(f"{func.name}: a descriptor where another argument is expected, or the reverse")
        values.append(_descriptor_argument(v, t) if isinstance(v, Descriptor) else scalar_argument(v, t))
    return values


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
    perturbation: Perturbation | None = None,
    stray: int = 0,
    order: str = "",
) -> None:
    """Run every program of a grid.

    Args:
        module: Result of ``parse``.
        grid: Number of programs along x, y and z.
        args: Runtime arguments of the public function; pointers are integer addresses. As in the function's signature,
            a descriptor is followed by its shape and strides.
        regions: The memory that the kernel may touch.
        meter: Counters, which the launch increases.
        max_bytes: Bound on the size of one intermediate array (one program may exceed it).
        deadline: Value of ``time.process_time`` at which to stop.
        sanitizer: Collects faults. With it each access must stay within the tensor that its pointer came from; without
            it within any region.
        names: Names of the runtime arguments, by default those of the regions they point into.
        perturbation: Integers to replace on the way.
        stray: Bytes by which an access may miss every region without an error, as on a GPU (``Memory.stray``).
        order: "forwards" or "backwards" runs one program after the other, from the first to the last or from the last
            to the first. Backwards, the first one counts of several lanes that one operation stores to one element; in
            any other order the last one does. By default many programs run together, in no order that counts.

    Raises:
        OutOfBounds: an unmasked access is outside every region, or its tensor.
        DeviceAssert: an assertion of the kernel failed.
        DecidesOnUnwritten: there is a sanitizer, and memory that nothing has written decides what a program does.
        Deadlock: programs wait for one another, and none can go on.
        Unsupported: the kernel uses an operation that is not implemented.
        TimeoutError: the deadline passed.
    """
    values = _arguments(module, args)
    annotate(module)
    memory = ChangeTrackingMemory(regions) if module.serial else Memory(regions)
    memory.args, memory.names, memory.stray, memory.first_lane_wins = list(args), names, stray, order == BACKWARDS
    meter.begin(module.entry.name, grid)
    if sanitizer is not None:
        memory.watch = sanitizer.watch(module, memory)
        for found in reordered(module):
            sanitizer.report(found)
    taint = memory.watch is not None and memory.watch.may_read_unwritten
    started = Launch(module, grid, values, memory, meter, deadline, perturbation, max_bytes, taint)
    try:
        with np.errstate(all="ignore"):
            if not module.serial:
                _run_in_chunks(started, order)
            elif order or not run_together(started):
                # More programs than a GPU can hold start in the order of their numbers, and may wait for earlier ones.
                turned = order == BACKWARDS and started.total <= RESIDENT
                run_in_turns(lambda k: _start(started, started.total - 1 - k if turned else k), started.total)
    finally:
        meter.end(memory.label)


def _start(started: Launch, k: int) -> tuple[ResumableProgram, Steps]:
    """Start one program of a launch whose programs wait for one another."""
    program = started.program(k)
    return program, program.start(started.module.entry, list(started.values))


def _run_in_chunks(started: Launch, order: str) -> None:
    """Run independent programs, a chunk of them at a time or each alone; ``order`` is that of ``launch``."""
    total = started.total
    one_by_one = range(total - 1, -1, -1) if order == BACKWARDS else range(total)
    for ids in (np.array([k]) for k in one_by_one) if order else started.chunks():
        started.machine(ids).call(started.module.entry, list(started.values))
