"""Values that no call has seen, on the device: a few draws laid end to end, of which every call gets another window."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kbx_env.device.driver import Driver, Seen

Window = Mapping[str, Sequence[int]]
"""The values of one call: by tensor, where its window into the ring starts and by how much its matrices are rolled."""


class DeviceWindows:
    """The rings of one timed case, in memory of the driver's."""

    def __init__(self, tools: Driver) -> None:
        self._tools = tools
        self._ring: dict[str, tuple[int, int, tuple[int, int]]] = {}
        """By tensor: address and elements of the ring, and the sizes of its matrices (0, 0 for none)."""

    def __len__(self) -> int:
        return len(self._ring)

    def lay(self, draws: Sequence[dict[str, Any]], turning: Mapping[str, Sequence[int]]) -> None:
        """Lay the tensors named by ``turning`` end to end; it gives the sizes of their matrices, or two zeros."""
        for name, sizes in turning.items():
            seen = [Seen(d[name]) for d in draws if name in d]
            address = self._tools.alloc(sum(s.size for s in seen))
            for k, s in enumerate(seen):
                self._tools.copy(address + k * s.size, s.pointer, s.size)
            self._ring[name] = address, sum(s.span for s in seen), (int(sizes[0]), int(sizes[1]))

    def free(self) -> None:
        """Give the memory back."""
        for address, _, _ in self._ring.values():
            self._tools.free(address)
        self._ring = {}

    def load(self, name: str, to: Seen, window: Sequence[int]) -> None:
        """Copy a window into a tensor, in stream order: (first element, rows and columns to roll by)."""
        ring, elements, matrix = self._ring[name]
        offset, down, right = window
        first = min(to.span, elements - offset)
        for source, at, count in ((offset, 0, first), (0, first, to.span - first)):
            if count:
                self._roll(ring + source * to.item, to.pointer + at * to.item, count, to.item, matrix, (down, right))

    def _roll(self, source: int, to: int, count: int, item: int, matrix: tuple[int, int], by: tuple[int, int]) -> None:
        rows, columns = matrix
        if not any(by):
            self._tools.copy(to, source, count * item)
            return
        # Element (i, j) comes from (i + down, j + right): four rectangles.
        for row, height in ((by[0], rows - by[0]), (0, by[0])):
            for column, width in ((by[1], columns - by[1]), (0, by[1])):
                if height and width:
                    out = ((row - by[0]) % rows, (column - by[1]) % columns * item)
                    size = (count // (rows * columns), height, width * item)
                    self._tools.copy_boxes(to, source, (row, column * item), out, size, (rows, columns * item))
