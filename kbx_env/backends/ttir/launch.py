"""Launch a parsed kernel over a grid, chunk by chunk."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from . import ops_arith, ops_math, ops_memory, ops_reduce, ops_tensor  # noqa: F401  (they register)
from .control import Machine
from .errors import TtirError
from .graph import Module
from .memory import Memory, Meter, Region

#: Chunks above this many bytes per array leave the processor caches and run slower.
_CACHE_BYTES = 4 << 20


def launch(
    module: Module,
    grid: tuple[int, int, int],
    args: Sequence[int | float],
    regions: Sequence[Region],
    meter: Meter,
    *,
    max_bytes: int = 64 << 20,
    deadline: float | None = None,
) -> None:
    """Run every program of a grid.

    Args:
        module: Result of ``parse``.
        grid: Number of programs along x, y and z.
        args: Runtime arguments of the public function; pointers are integer addresses.
        regions: The memory that the kernel may touch.
        meter: Counters, which the launch increases.
        max_bytes: Bound on the size of one intermediate array (one program may exceed it).
        deadline: Value of ``time.monotonic`` at which to stop.

    Raises:
        OutOfBounds: an unmasked access is outside every region.
        DeviceAssert: an assertion of the kernel failed.
        Unsupported: the kernel uses an operation that is not implemented.
        TimeoutError: the deadline passed.
    """
    func = module.entry
    entry = func.body.blocks[0]
    if len(args) != len(entry.args):
        raise TtirError(f"{func.name} takes {len(entry.args)} arguments, not {len(args)}")
    values = []
    for v, t in zip(args, entry.arg_types, strict=True):
        if t.elem == "ptr" or t.dtype.kind in "ib":
            size = t.dtype.itemsize
            bits = np.array(int(v) & ((1 << (8 * size)) - 1), f"u{size}")
            values.append(bits.astype(t.dtype).reshape(1))
        else:
            values.append(np.array(float(v)).astype(t.dtype).reshape(1))
    meter.launches += 1
    total = grid[0] * grid[1] * grid[2]
    chunk = max(1, min(max_bytes, _CACHE_BYTES) // (8 * module.max_elements))
    if module.serial:
        chunk = 1
    memory = Memory(regions)
    with np.errstate(all="ignore"):
        for start in range(0, total, chunk):
            ids = np.arange(start, min(start + chunk, total), dtype=np.int64)
            pids = (
                (ids % grid[0]).astype(np.int32),
                (ids // grid[0] % grid[1]).astype(np.int32),
                (ids // (grid[0] * grid[1])).astype(np.int32),
            )
            Machine(module, func.name, grid, pids, memory, meter, deadline).call(func, list(values))
