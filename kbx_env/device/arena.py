"""Device memory in large chunks, of which parts are given out: the driver is asked seldom.

An allocation costs the driver four requests, and most of them take a lock of the whole host (docs/measurements).
"""

from __future__ import annotations

import threading
from collections.abc import Callable

ALIGN = 512
"""Alignment of every address in bytes, as the driver aligns its own."""
CHUNK_BYTES = 64 << 20
"""Least size of a chunk."""


class Arena:
    """Gives out parts of chunks. Thread-safe.

    Memory that is given back may be given out again at once: whoever uses both must do so in the order of one stream.

    Args:
        reserve: Allocates a chunk of so many bytes and returns its address; raises RuntimeError where there is no memory.
        release: Frees a chunk by its address.
        kept: Bytes of chunks that are kept while nothing of them is given out.
        chunk: Least bytes of a chunk.

    Attributes:
        kept: As above; may be changed.
    """

    def __init__(
        self, reserve: Callable[[int], int], release: Callable[[int], None], kept: int, chunk: int = CHUNK_BYTES
    ) -> None:
        self._reserve, self._release, self._chunk, self.kept = reserve, release, chunk, kept
        self._chunks: dict[int, int] = {}  # bytes by address
        self._gaps: dict[int, tuple[int, int]] = {}  # by address: bytes that are free there, and the address of their chunk
        self._parts: dict[int, tuple[int, int]] = {}  # the same of what is given out
        self._lock = threading.RLock()

    @property
    def reserved(self) -> int:
        """Bytes of all chunks."""
        return sum(self._chunks.values())

    def alloc(self, size: int) -> int:
        """Return the address of memory that nobody else has.

        Args:
            size: Bytes; 0 counts as 1.

        Raises:
            RuntimeError: There is no memory left.
        """
        size = max(1, -(-size // ALIGN)) * ALIGN
        with self._lock:
            fitting = [(gap, address) for address, (gap, _) in self._gaps.items() if gap >= size]
            gap, address = min(fitting) if fitting else self._grow(size)
            chunk = self._gaps.pop(address)[1]
            self._parts[address] = size, chunk
            if gap > size:
                self._gaps[address + size] = gap - size, chunk
            return address

    def preallocate(self, size: int) -> None:
        """Have one piece of so many bytes ready, for later calls of ``alloc``; without effect where there is no memory.

        Args:
            size: Bytes.
        """
        with self._lock:
            if size <= max((gap for gap, _ in self._gaps.values()), default=0):
                return
            self.trim()
            try:
                self._grow(-(-size // ALIGN) * ALIGN)
            except RuntimeError:
                return

    def _grow(self, size: int) -> tuple[int, int]:
        """Add a chunk; its bytes and its address."""
        wanted = max(size, self._chunk)
        try:
            address = self._reserve(wanted)
        except RuntimeError:
            self.trim()
            wanted, address = size, self._reserve(size)
        self._chunks[address] = wanted
        self._gaps[address] = wanted, address
        return wanted, address

    def free(self, address: int) -> None:
        """Give memory back.

        Args:
            address: As ``alloc`` returned it.
        """
        with self._lock:
            size, chunk = self._parts.pop(address)
            for begin, (gap, of) in list(self._gaps.items()):
                if of == chunk and begin in (address + size, address - gap):  # a neighbour
                    del self._gaps[begin]
                    address, size = min(address, begin), size + gap
            self._gaps[address] = size, chunk
            if size == self._chunks[chunk]:
                self.trim(self.kept)

    def trim(self, keep: int = 0) -> None:
        """Free chunks of which nothing is given out, the largest first.

        Args:
            keep: Bytes of such chunks that may stay.
        """
        with self._lock:
            empty = sorted((size, at) for at, size in self._chunks.items() if self._gaps.get(at, (0, 0))[0] == size)
            left = sum(size for size, _ in empty)
            while empty and left > keep:
                size, address = empty.pop()
                del self._chunks[address], self._gaps[address]
                self._release(address)
                left -= size
