"""Counts the work of a launch on a sample of its programs, without a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from kbx_env.backends.cost.counting import SECTOR, Counter, Counts
from kbx_env.backends.ttir import Meter, Module, Region, TtirError, parse
from kbx_env.backends.ttir.interp.launch import scalar_argument
from kbx_env.backends.ttir.interp.memory import Memory
from kbx_env.backends.ttir.interp.programs import coordinates

_PROGRAMS = (4, 16)
"""Smallest and largest number of sampled programs."""
_ELEMENTS = 1 << 17
"""Number of sampled programs times the elements of the kernel's largest tensor, within ``_PROGRAMS``."""


@dataclass(frozen=True)
class LaunchFacts:
    """The work of one kernel launch, summed over its programs, and its resources.

    Attributes:
        kernel: Name of the kernel.
        programs: Number of programs of the grid.
        num_warps: Warps per program.
        num_stages: Depth of software pipelines.
        registers: 32-bit registers per thread.
        local_bytes: Bytes of local memory (spills) per thread.
        shared_bytes: Bytes of shared memory per program.
        loaded_bytes: Bytes read by unmasked lanes.
        stored_bytes: Bytes written by unmasked lanes.
        unique_loaded: Bytes read at least once, which DRAM must deliver.
        unique_stored: Bytes written at least once.
        loaded_sectors: Sectors of 32 bytes requested by loads, each program's repeated requests counted again.
        stored_sectors: The same for stores.
        dot_flops: Operations of matrix products by kind, such as "f16*f16->f32" or "tf32".
        alu_flops: Lane operations of the ordinary arithmetic units, in units of one fp32 operation.
        special_flops: Lane operations of the special function unit (exponential, sine, reciprocal, ...).
        atomics: Lanes of atomic operations.
        atomic_lines: Distinct addresses that atomics touch, summed over programs.
        load_rounds: Rounds of dependent global loads that one program waits for in sequence; pipelined loops wait for
            parts.
        syncs: Number of reductions, scans and matrix products of one program.
    """

    kernel: str
    programs: int
    num_warps: int
    num_stages: int = 1
    registers: int = 32
    local_bytes: int = 0
    shared_bytes: int = 0
    loaded_bytes: float = 0
    stored_bytes: float = 0
    unique_loaded: float = 0
    unique_stored: float = 0
    loaded_sectors: float = 0
    stored_sectors: float = 0
    dot_flops: dict[str, float] = field(default_factory=dict)
    alu_flops: float = 0
    special_flops: float = 0
    atomics: float = 0
    atomic_lines: float = 0
    load_rounds: float = 0
    syncs: float = 0

    @property
    def unique_bytes(self) -> float:
        """Bytes of memory touched at least once."""
        return self.unique_loaded + self.unique_stored

    @property
    def sectors(self) -> float:
        """Sectors of 32 bytes requested."""
        return self.loaded_sectors + self.stored_sectors

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain data."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> LaunchFacts:
        """Build an object from the result of ``to_dict``."""
        return cls(**data)


def sample_ids(total: int, count: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Choose the programs of a sample.

    Args:
        total: Number of programs of the grid.
        count: Largest size of the sample.

    Returns:
        Numbers of programs: int64, (at most ``count``,), the middles of equal parts of the grid.
    """
    if total <= count:
        return np.arange(total, dtype=np.int64)
    # Middles, because the last program of a grid is often partly masked and not representative.
    return ((np.arange(count) * 2 + 1) * total // (2 * count)).astype(np.int64)


def _values(module: Module, args: Sequence[int | float]) -> list[Any]:
    entry = module.entry.body.blocks[0]
    if len(args) != len(entry.args):
        raise TtirError(f"{module.entry.name} takes {len(entry.args)} arguments, not {len(args)}")
    return [scalar_argument(v, t) for v, t in zip(args, entry.arg_types, strict=True)]


def count(
    text: str | Module,
    grid: tuple[int, int, int],
    args: Sequence[int | float],
    regions: Sequence[Region],
    *,
    num_stages: int = 1,
    deadline: float | None = None,
) -> Counts:
    """Count the work of a launch on a sample of its programs, which write to the regions.

    Args:
        text: TTIR of the kernel, or its parsed form.
        grid: Programs along x, y and z.
        args: Runtime arguments of the public function; pointers are integer addresses.
        regions: The memory, of the true sizes; only values that addresses depend on must be right.
        num_stages: Depth of the software pipelines that the kernel was compiled with.
        deadline: Value of ``time.process_time`` at which to stop.

    Returns:
        Sums over the whole grid, except the counts that are per program.

    Raises:
        OutOfBounds: an unmasked access is outside every region.
        Unsupported: the kernel uses an operation that is not implemented.
        TimeoutError: the deadline passed.
    """
    module = parse(text) if isinstance(text, str) else text
    total = grid[0] * grid[1] * grid[2]
    low, high = _PROGRAMS
    ids = sample_ids(total, min(max(_ELEMENTS // module.max_elements, low), high))
    machine = Counter(module, module.entry.name, grid, coordinates(grid, ids), Memory(regions), Meter(), deadline)
    machine.num_stages = num_stages
    with np.errstate(all="ignore"):
        machine.call(module.entry, _values(module, args))
    return machine.finish(total / max(len(ids), 1))


def facts(
    counts: Counts,
    *,
    kernel: str,
    programs: int,
    num_warps: int,
    num_stages: int,
    registers: int,
    shared_bytes: int,
    local_bytes: int = 0,
) -> LaunchFacts:
    """Combine the counts of a launch with its resources; the other arguments are attributes of ``LaunchFacts``."""
    return LaunchFacts(
        kernel=kernel,
        programs=programs,
        num_warps=num_warps,
        num_stages=num_stages,
        registers=registers,
        local_bytes=local_bytes,
        shared_bytes=shared_bytes,
        loaded_bytes=counts.loaded_bytes,
        stored_bytes=counts.stored_bytes,
        unique_loaded=sum(min(s * SECTOR, b) for s, b in counts.loaded.values()),
        unique_stored=sum(min(s * SECTOR, b) for s, b in counts.stored.values()),
        loaded_sectors=sum(s for s, _ in counts.loaded.values()),
        stored_sectors=sum(s for s, _ in counts.stored.values()),
        dot_flops=dict(counts.dot_flops),
        alu_flops=counts.alu,
        special_flops=counts.special,
        atomics=counts.atomics,
        atomic_lines=counts.atomic_lines,
        load_rounds=counts.load_rounds,
        syncs=counts.syncs,
    )
