"""The memory behind a trace: the host code's allocations at the addresses it knows, and what is known of each byte."""

from __future__ import annotations

import bisect
import itertools
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

MAX_BYTES = 4 << 30
"""Largest sum of the sizes of a submission's storages."""
MAX_ELEMENTS = 1 << 28
"""Largest number of elements of a view."""
MAX_DIMENSIONS = 32
TOP = 1 << 56
"""Exclusive bound of addresses and strides, so that sums and products with sizes fit into 64 bits."""
_NAMES = (
    "float16 bfloat16 float32 float64 int8 int16 int32 int64 uint8 uint16 uint32 uint64 bool complex64 complex128 "
    "float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz"
)
DTYPES = {name: getattr(torch, name) for name in _NAMES.split() if hasattr(torch, name)}
"""Dtypes of views by the name in a trace."""
UNWRITTEN = 0xFF
"""Bytes of fresh memory: NaN in every float format, -1 in every integer. On a GPU its contents are arbitrary."""
CONSTANT, INPUT, MOVED = 1, 2, 3
"""Origins of a byte: a fill; an argument at its own place; a value that torch moved or that the host computed."""


class TraceError(Exception):
    """A step that makes no sense. The recorder sends no such step, so the trace is forged."""


@dataclass
class Storage:
    """One allocation.

    Attributes:
        base: Address of the first byte, as the host code sees it.
        data: The bytes: uint8, (size,).
        initialised: Whether each byte was written: bool, (size,).
        stored: Whether each byte was written by a Triton store of this call, or is a copy of such a byte: bool,
            (size,).
        origin: Where a byte came from that no kernel stored: ``CONSTANT``, ``INPUT`` or ``MOVED``: uint8, (size,).
        kinds: The kinds of numbers that were written here, as ``kind`` names them; host copies may convert no others.
        argument: Whether this is the storage of an argument.
        returned: Whether an earlier call returned it.
        passed: Dtype of the integer or boolean argument of this call of whose elements alone the written bytes are
            copies, or which this is; ``None`` for any other memory. A kernel's stores show in ``stored``.
        assembled: Of torch's copies of parts of tensors, or in another order, to here since the last launch: their number,
            and the first byte and the end of the part of the storage that they cover.
        inputs: Names of the inputs on which some value here may depend.
        dots: Kinds of matrix products that some value here may have passed through.
        serial: A unique number; addresses are reused.
    """

    base: int
    data: np.ndarray
    initialised: np.ndarray
    stored: np.ndarray
    origin: np.ndarray
    kinds: set[str] = field(default_factory=set)
    argument: bool = False
    returned: bool = False
    passed: torch.dtype | None = None
    assembled: tuple[int, int, int] = (0, 0, 0)
    inputs: set[str] = field(default_factory=set)
    dots: set[str] = field(default_factory=set)
    serial: int = field(default_factory=itertools.count().__next__)

    @property
    def end(self) -> int:
        """The address after the last byte."""
        return self.base + int(self.data.size)

    def begin_call(self) -> None:
        """Note that a call begins: what this memory holds and no fill made counts as moved here by the host."""
        # Every byte is looked at, so that this is arithmetic: assigning through a mask takes ten times as long.
        self.origin |= np.multiply(self.origin != CONSTANT, MOVED, dtype=np.uint8)


@dataclass(frozen=True)
class View:
    """A strided view of a storage that lies within it.

    Attributes:
        storage: The storage.
        dtype: Type of an element.
        offset: Bytes from the beginning of the storage to the first element.
        shape: Sizes.
        stride: Strides in elements.
    """

    storage: Storage
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of indices; elements with stride 0 count repeatedly."""
        return math.prod(self.shape)

    def values(self) -> torch.Tensor:
        """Return the elements as a tensor on the storage's memory."""
        if not self.numel:
            return torch.empty(self.shape, dtype=self.dtype)
        typed = torch.from_numpy(self.storage.data)
        size = self.dtype.itemsize
        typed = typed[: typed.numel() // size * size].view(self.dtype)
        return typed.as_strided(self.shape, self.stride, self.offset // size)

    def flags(self, which: np.ndarray) -> torch.Tensor:
        """Return the entry of each element's first byte from an array over the storage's bytes: shape of the view."""
        return self._bytes(which)[..., 0]

    def count_set(self, which: np.ndarray) -> int:
        """Return how many elements have their first byte set in a boolean array over the storage's bytes."""
        if not self.numel:
            return 0
        # Nearly always all are set, and to see that of a whole array is much faster than to count every n-th entry.
        if self.dense and bool(which.all()):
            return self.numel
        return int(self.flags(which).count_nonzero())

    @property
    def end(self) -> int:
        """The byte of the storage after the last element; the view must have elements."""
        return self.offset + (1 + sum((n - 1) * s for n, s in zip(self.shape, self.stride, strict=True))) * self.dtype.itemsize

    @property
    def dense(self) -> bool:
        """Whether the view is its whole storage in row-major order."""
        expected = 1
        for n, s in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if n != 1 and s != expected:
                return False
            expected *= n
        return self.offset == 0 and self.numel * self.dtype.itemsize == self.storage.data.size

    @property
    def distinct(self) -> bool:
        """Whether no two indices address the same element."""
        reach = 0
        for s, n in sorted((s, n) for n, s in zip(self.shape, self.stride, strict=True) if n > 1):
            if s <= reach:
                return False
            reach += s * (n - 1)
        return True

    def mark(self, which: np.ndarray, value: bool | int | torch.Tensor) -> None:
        """Set the entries of the view's bytes in an array over the storage's bytes.

        Args:
            which: The array, such as ``storage.stored``.
            value: One value, or a tensor of the view's shape with a value for each element.
        """
        target = self._bytes(which)
        if isinstance(value, bool | int):
            target.fill_(value)
        else:
            target.copy_(value.unsqueeze(-1).expand(target.shape))

    def _bytes(self, which: np.ndarray) -> torch.Tensor:
        size = self.dtype.itemsize
        strides = [s * size for s in self.stride]
        return torch.from_numpy(which).as_strided([*self.shape, size], [*strides, 1], self.offset)


def kind(dtype: torch.dtype) -> str:
    """Return the kind of number that a dtype stores, as kernels name it: ``f32``, ``i8``, ``i1``, ...

    Signed and unsigned integers are one kind; complex numbers have the kind of their parts.
    """
    if dtype is torch.bool:
        return "i1"
    if dtype.is_complex:
        return f"f{4 * dtype.itemsize}"
    if not dtype.is_floating_point:
        return f"i{8 * dtype.itemsize}"
    if dtype.itemsize == 1:
        return str(dtype).removeprefix("torch.float8_").upper().replace("E", "f8E", 1)
    return "bf16" if dtype is torch.bfloat16 else f"f{8 * dtype.itemsize}"


def unit_bytes(kinds: set[str]) -> int:
    """Return the bytes of the smallest number that was written to a storage: so many count as one value when read.

    Args:
        kinds: ``Storage.kinds``.

    Returns:
        1 to 8; 1 for numbers of unknown size, 8 where nothing was written.
    """
    found = [8]
    for name in kinds:
        digits = re.match(r"(?:bf|f|i)(\d+)", name)
        found.append(max(1, int(digits.group(1)) // 8) if digits else 1)
    return min(found)


def bounded_int(value: Any, what: str, top: int) -> int:
    """Check an integer from a trace.

    Args:
        value: The value.
        what: Its name in the message.
        top: Exclusive upper bound.

    Returns:
        The value.

    Raises:
        TraceError: it is no integer in [0, top).
    """
    if type(value) is not int or not 0 <= value < top:
        raise TraceError(f"{what}: {str(value)[:40]!r}")
    return value


_EMPTY = Storage(0, np.zeros(0, np.uint8), np.zeros(0, bool), np.zeros(0, bool), np.zeros(0, np.uint8))


class Heap:
    """All storages of one submission, by address.

    Args:
        blank: Fill new storages with zeros instead of ``UNWRITTEN``.

    Attributes:
        bytes: Sum of the sizes of the storages.
    """

    def __init__(self, *, blank: bool = False) -> None:
        self._blank = blank
        self._bases: list[int] = []
        self._storages: dict[int, Storage] = {}
        self.bytes = 0

    def __iter__(self) -> Iterator[Storage]:
        return iter([self._storages[b] for b in self._bases])

    def allocate(self, base: Any, size: Any) -> Storage:
        """Add a storage of unwritten bytes.

        Args:
            base: Its address.
            size: Its size in bytes.

        Returns:
            The storage.

        Raises:
            TraceError: it overlaps another one, or all together exceed ``MAX_BYTES``.
        """
        base, size = bounded_int(base, "address", TOP), bounded_int(size, "size", MAX_BYTES + 1)
        if self.bytes + size > MAX_BYTES:
            raise TraceError(f"more than {MAX_BYTES >> 30} GiB of memory")
        at = bisect.bisect_right(self._bases, base)
        if (
            at
            and self._storages[self._bases[at - 1]].end > base
            or at < len(self._bases)
            and base + size > self._bases[at]
        ):
            raise TraceError("overlapping allocations")
        # Pages of zeros take memory only once they are written; estimates write few of them.
        data = np.zeros(size, np.uint8) if self._blank else np.full(size, UNWRITTEN, np.uint8)
        found = Storage(base, data, np.zeros(size, bool), np.zeros(size, bool), np.zeros(size, np.uint8))
        self._bases.insert(at, base)
        self._storages[base] = found
        self.bytes += size
        return found

    def free(self, base: Any) -> None:
        """Remove the storage at an address; other addresses are ignored."""
        found = self._storages.pop(base, None) if type(base) is int else None
        if found is not None:
            self._bases.remove(found.base)
            self.bytes -= int(found.data.size)

    def find(self, address: int) -> Storage | None:
        """Return the storage that contains an address, ``None`` without one."""
        k = bisect.bisect_right(self._bases, address) - 1
        found = self._storages[self._bases[k]] if k >= 0 else None
        return found if found is not None and address < found.end else None

    def view(self, spec: Any) -> View:
        """Check a view from a trace.

        Args:
            spec: ``[base address of the storage, dtype, offset in bytes, shape, strides in elements]``.

        Returns:
            The view.

        Raises:
            TraceError: the storage or the dtype is unknown, or elements lie outside the storage.
        """
        if not isinstance(spec, list) or len(spec) != 5 or not all(isinstance(x, list) for x in spec[3:]):
            raise TraceError("malformed view")
        base, name, offset, shape, stride = spec
        dtype = DTYPES.get(name) if isinstance(name, str) else None
        if dtype is None or len(shape) != len(stride) or len(shape) > MAX_DIMENSIONS:
            raise TraceError("malformed view")
        shape = [bounded_int(n, "shape", MAX_ELEMENTS + 1) for n in shape]
        stride = [bounded_int(n, "stride", TOP) for n in stride]
        numel = math.prod(shape)
        if math.prod(n or 1 for n in shape) >= TOP:  # the product of an empty tensor's other sizes counts, too
            raise TraceError("view of too many elements")
        if not numel:
            return View(_EMPTY, dtype, 0, tuple(shape), tuple(stride))
        found = self._storages.get(base) if type(base) is int else None
        if found is None:
            raise TraceError("view of unknown memory")
        offset = bounded_int(offset, "offset", int(found.data.size) + 1)
        span = (1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))) * dtype.itemsize
        if numel > MAX_ELEMENTS or offset % dtype.itemsize or offset + span > found.data.size:
            raise TraceError("view outside of its memory")
        return View(found, dtype, offset, tuple(shape), tuple(stride))
