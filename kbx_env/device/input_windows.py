"""New input values for every call, on the device: each call gets another window of a few draws laid end to end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kbx_env.device.driver import Driver, TensorMetadata

Window = Mapping[str, Sequence[int]]
"""The values of one call, by tensor: first element of the window in the ring, rows and columns to roll by."""


class DeviceWindows:
    """The rings of one timed case, in the driver's memory. A ring holds the values of one tensor from all draws.

    Args:
        driver: The device's driver.
    """

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._rings: dict[str, tuple[int, int, tuple[int, int]]] = {}
        """By tensor: address and elements of the ring, and the rows and columns of its matrices (0, 0 for none)."""

    def __len__(self) -> int:
        return len(self._rings)

    def lay(self, draws: Sequence[dict[str, Any]], turning: Mapping[str, Sequence[int]]) -> None:
        """Lay the values of tensors end to end, in stream order.

        Args:
            draws: Sets of arguments.
            turning: The tensors, with the rows and columns of the matrices in them, or two zeros.
        """
        for name, sizes in turning.items():
            tensors = [TensorMetadata(d[name]) for d in draws if name in d]
            address = self._driver.alloc(sum(t.size for t in tensors))
            for k, t in enumerate(tensors):
                self._driver.copy(address + k * t.size, t.pointer, t.size)
            self._rings[name] = address, sum(t.span for t in tensors), (int(sizes[0]), int(sizes[1]))

    def free(self) -> None:
        """Free the memory of all rings."""
        for address, _, _ in self._rings.values():
            self._driver.free(address)
        self._rings = {}

    def load(self, name: str, to: TensorMetadata, window: Sequence[int]) -> None:
        """Copy a window into a tensor, in stream order; it continues at the beginning of the ring.

        Args:
            name: The tensor's name.
            to: The tensor.
            window: First element, rows and columns to roll by.
        """
        ring, elements, matrix = self._rings[name]
        offset, down, right = window
        first = min(to.span, elements - offset)
        for source, at, count in ((offset, 0, first), (0, first, to.span - first)):
            if count:
                self._roll(
                    ring + source * to.itemsize,
                    to.pointer + at * to.itemsize,
                    count,
                    to.itemsize,
                    matrix,
                    (down, right),
                )

    def _roll(
        self, source: int, to: int, count: int, itemsize: int, matrix: tuple[int, int], by: tuple[int, int]
    ) -> None:  # fmt: skip
        """Copy ``count`` elements, with every matrix rolled by rows and columns."""
        rows, columns = matrix
        if not any(by):
            self._driver.copy(to, source, count * itemsize)
            return
        # Element (i, j) comes from (i + down, j + right), modulo the sizes: four rectangles.
        for row, height in ((by[0], rows - by[0]), (0, by[0])):
            for column, width in ((by[1], columns - by[1]), (0, by[1])):
                if height and width:
                    out = ((row - by[0]) % rows, (column - by[1]) % columns * itemsize)
                    size = (count // (rows * columns), height, width * itemsize)
                    at = (row, column * itemsize)
                    self._driver.copy_boxes(to, source, at, out, size, (rows, columns * itemsize))
