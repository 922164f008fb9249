"""What one call's launches did, by kernel, by storage and by operand, for the facts of the call."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from kbx_env.backends import ttir
from kbx_env.backends.engine.storage import Heap, Storage
from kbx_env.backends.ttir.interp.traffic import LaunchTraffic

MAX_ROWS = 200
"""Kernels reported one by one; the sums cover all."""

Held = Callable[[frozenset[int]], list[Storage]]


class Ledger:
    """Bytes that went through memory of the submission's own, and the operands of products that depend on an input.

    Attributes:
        results: serial numbers of the storages that the call returned.
        operands: (kind, whether every operand depends on an input), for products and roundings to int8.
    """

    def __init__(self) -> None:
        self.results: set[int] = set()
        self.operands: set[tuple[str, bool]] = set()
        self._bytes: Counter[int] = Counter()
        self._unknown = 0

    def moved(self, heap: Heap, values: Sequence[Any], launch: LaunchTraffic) -> None:
        """Count one launch: bytes by the storage they went to or came from, arguments of the call left out."""
        for positions, size in launch.arguments.items():
            reached = [heap.at(address(values[k])) for k in positions]
            own = {s.serial: s for s in reached if s is not None and not s.argument}
            if positions and all(s is not None and s.argument for s in reached):
                continue
            if len(positions) == 1 and own:
                self._bytes[next(iter(own))] += size
            else:  # a pointer out of memory, or one of several: nobody can say that it led to an argument
                self._unknown += size

    def depends(self, module: ttir.Module, held: Held) -> None:
        """Note which operands depend on inputs; ``held`` gives the storages of arguments."""
        for kind, operands in ttir.operand_slices(module):
            known = [any(s.inputs for s in held(arguments)) for arguments in operands]
            self.operands.add((kind, bool(known) and all(known)))

    @property
    def between(self) -> tuple[int, int]:
        """Bytes through storages that are neither arguments nor results, and how many such storages there were."""
        own = {k: n for k, n in self._bytes.items() if k not in self.results}
        return sum(own.values()) + self._unknown, len(own)


def address(value: Any) -> int:
    """Where an argument points to, or where a descriptor's tensor begins; -1 where it does not."""
    found = value.base if isinstance(value, ttir.Descriptor) else value
    return found if isinstance(found, int) else -1


def by_kernel(launches: Sequence[LaunchTraffic]) -> list[dict[str, Any]]:
    """Sums by kernel, with bytes by tensor."""
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
            held = row["tensors"].setdefault(name, [0, 0, 0])
            row["tensors"][name] = [held[0] + t.loaded, held[1] + t.stored, held[2] + t.atomic]
        for unit, n in r.flops.items():
            row["flops"][unit] = row["flops"].get(unit, 0) + n
    return list(rows.values())[:MAX_ROWS]
