"""The interface between a launch's memory and a sanitizer that watches it.

The memory, the handlers of loads and stores, and the sanitizer all import this module; none of them needs to import
another one for its annotations.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from kbx_env.backends.ttir.errors import Finding
from kbx_env.backends.ttir.frontend.graph import Op
from kbx_env.backends.ttir.sanitizer.shadow import Array

Pick = Callable[[Array, int], Array]
"""Maps an array over the programs of a chunk to the lanes of an access.

Called with an array of shape (programs,) and the number for a lane that stands for all programs; returns one entry per
lane.
"""
LoadHook = Callable[[int, Array, Pick], None]
"""Called before a load with the region's index, byte offsets of the unmasked lanes (int64, (lanes,)) and a ``Pick``."""
StoreHook = Callable[[int, Array, Array, Pick], Callable[[], None] | None]
"""Called before a store with the index of the region, byte offsets and values of the unmasked lanes, and a ``Pick``.

Returns a function to call once the values are written, or ``None``.
"""


@dataclass(frozen=True)
class Extent:
    """The bytes that one pointer argument may touch, finer than the storage it points into.

    Attributes:
        arg: Position of the pointer among the runtime arguments.
        start: Address of the first byte.
        size: Number of bytes, 0 for an empty tensor.
        name: Name of the tensor in messages, "" for the name of the region.
    """

    arg: int
    start: int
    size: int
    name: str = ""


class ProgramChunk(Protocol):
    """The programs that run together, as far as a sanitizer needs to know them; ``control.Machine`` implements it."""

    kernel: str
    """Name of the kernel."""
    grid: tuple[int, int, int]
    """Number of programs along x, y and z."""
    pids: tuple[Array, Array, Array]
    """Coordinates of the programs along x, y and z: int32, (programs,)."""
    programs: int
    """Number of programs in the chunk."""

    def live(self) -> Array:
        """Return the mask of active programs: bool, (programs,)."""

    def count(self) -> int:
        """Return the number of active programs."""

    def where(self, op: Op) -> tuple[str, int]:
        """Return the source file and line of an operation."""


class LaunchWatch(Protocol):
    """Watches the accesses of one launch; ``sanitizer.Watch`` implements it."""

    unwritten: int
    """Number of accesses so far that read bytes that nothing has written."""
    may_read_unwritten: bool
    """Whether the kernel's text can read such bytes."""

    def report(self, found: Finding) -> None:
        """Keep a finding."""

    def extents(self, op: Op) -> tuple[Extent, ...]:
        """Return what an access may touch, () when its pointer's origin is unknown."""

    def loading(self, m: ProgramChunk, op: Op, size: int) -> LoadHook | None:
        """Return the hook for a load of elements of ``size`` bytes, ``None`` when there is nothing to watch."""

    def storing(self, m: ProgramChunk, op: Op, size: int) -> StoreHook:
        """Return the hook for a store of elements of ``size`` bytes."""

    def updating(self, m: ProgramChunk, op: Op, k: int, offsets: Array, programs: Array, size: int) -> None:
        """Watch an atomic operation.

        Args:
            m: The programs that run together.
            op: The operation.
            k: Index of the region.
            offsets: Byte offsets of the unmasked lanes: int64, (lanes,).
            programs: Position in the chunk of each lane's program: (lanes,).
            size: Bytes of one element.
        """

    def unwritten_again(self, k: int) -> None:
        """Note that bytes of region ``k`` were overwritten with unwritten values, and that its mask says so."""
