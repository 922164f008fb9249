"""Counters of one call's launches, by kernel, storage and operand, for the facts of the call."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from kbx_env.backends import ttir
from kbx_env.backends.engine.storage import Heap, Storage
from kbx_env.backends.ttir.interp.traffic import LaunchTraffic

MAX_ROWS = 200
"""Largest number of kernels that are reported one by one; the sums cover all."""

StorageLookup = Callable[[frozenset[int]], list[Storage]]
"""Returns the storages that arguments point into, given the positions of the arguments."""


class CallCounters:
    """Counts the bytes that went through memory of the submission's own, and operands that depend on an input.

    Attributes:
        results: Serial numbers of the storages that the call returned.
        operands: (kind, whether every operand depends on an input), for matrix products and roundings to int8.
    """

    def __init__(self) -> None:
        self.results: set[int] = set()
        self.operands: set[tuple[str, bool]] = set()
        self._bytes: Counter[int] = Counter()
        self._unknown = 0

    def count_traffic(self, heap: Heap, values: Sequence[Any], launch: LaunchTraffic) -> None:
        """Count the bytes of one launch by storage, without those of the call's arguments.

        Args:
            heap: The memory of the submission.
            values: Arguments of the launch.
            launch: What it moved.
        """
        for positions, size in launch.arguments.items():
            reached = [heap.find(base_address(values[k])) for k in positions]
            own = {s.serial: s for s in reached if s is not None and not s.argument}
            if positions and all(s is not None and s.argument for s in reached):
                continue
            if len(positions) == 1 and own:
                self._bytes[next(iter(own))] += size
            else:  # a pointer loaded from memory, or one of several pointers: not known to lead to an argument
                self._unknown += size

    def count_operands(self, module: ttir.Module, storages_of: StorageLookup) -> None:
        """Record which operands of products and roundings in a kernel depend on inputs."""
        for kind, operands in ttir.operand_slices(module):
            known = [any(s.inputs for s in storages_of(arguments)) for arguments in operands]
            self.operands.add((kind, bool(known) and all(known)))

    @property
    def between(self) -> tuple[int, int]:
        """Bytes through storages that are neither arguments nor results, and the number of such storages."""
        own = {k: n for k, n in self._bytes.items() if k not in self.results}
        return sum(own.values()) + self._unknown, len(own)


def base_address(value: Any) -> int:
    """Return the address in a launch argument: that of a pointer or of a descriptor's tensor; -1 for other numbers."""
    found = value.base if isinstance(value, ttir.Descriptor) else value
    return found if isinstance(found, int) else -1


def rows_by_kernel(launches: Sequence[LaunchTraffic]) -> list[dict[str, Any]]:
    """Sum launches by kernel.

    Args:
        launches: The launches of a call.

    Returns:
        At most ``MAX_ROWS`` rows: the kernel, launches, programs, bytes of sectors, bytes read again, bytes (loaded,
        stored, atomic) by tensor and operations by unit.
    """
    rows: dict[str, dict[str, Any]] = {}
    for r in launches:
        row = rows.setdefault(r.kernel, {
            "kernel": r.kernel, "launches": 0, "programs": 0, "sectors": 0, "reread": 0, "tensors": {}, "flops": {},
        })  # fmt: skip
        row["launches"] += 1
        row["programs"] += math.prod(r.grid)
        row["sectors"] += r.loaded_sector_bytes + r.stored_sector_bytes
        row["reread"] += r.reread_bytes
        for name, t in r.tensors.items():
            before = row["tensors"].setdefault(name, [0, 0, 0])
            row["tensors"][name] = [before[0] + t.loaded, before[1] + t.stored, before[2] + t.atomic]
        for unit, n in r.flops.items():
            row["flops"][unit] = row["flops"].get(unit, 0) + n
    return list(rows.values())[:MAX_ROWS]
