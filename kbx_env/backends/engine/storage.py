"""The memory behind a trace: what the host code allocated, at the addresses it knows, with what is known of each byte."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

MAX_BYTES = 4 << 30
"""All storages of one submission together."""
MAX_ELEMENTS = 1 << 28
MAX_DIMENSIONS = 32
TOP = 1 << 56
"""Addresses lie below this, so that no sum of address and size leaves 64 bits."""
_NAMES = (
    "float16 bfloat16 float32 float64 int8 int16 int32 int64 uint8 uint16 uint32 uint64 bool complex64 complex128 "
    "float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz"
)
DTYPES = {name: getattr(torch, name) for name in _NAMES.split() if hasattr(torch, name)}
UNWRITTEN = 0xFF
CONSTANT, INPUT, MOVED = 1, 2, 3
"""Origins of a byte: a fill; an argument, in the order in which it was given; anything that torch put elsewhere, or that the
host computed."""
"""Fresh memory: NaN in every float format, -1 in every integer; on a GPU it holds anything."""


class TraceError(Exception):
    """A step that fits no memory: never said by the recorder, so somebody forged it."""


@dataclass
class Storage:
    """One allocation.

    Attributes:
        base: address of the first byte, as the host code sees it.
        data: the bytes, uint8.
        initialised: per byte, whether anything was written there.
        stored: per byte, whether its value came out of a Triton store of this call (copies carry it along).
        origin: per byte, where a value came from that no kernel stored: ``CONSTANT``, ``INPUT`` or ``MOVED``.
        kinds: the kinds of numbers that were written here, as ``kind`` names them; conversions must agree with them.
        argument: whether this is the storage of an argument.
        returned: whether an earlier call returned it.
        inputs: names of the inputs on which some value here may depend.
        dots: kinds of matrix products through which some value here may have passed.
        serial: a number of its own; an address may be given out again.
    """

    base: int
    data: np.ndarray
    initialised: np.ndarray
    stored: np.ndarray
    origin: np.ndarray
    kinds: set[str] = field(default_factory=set)
    argument: bool = False
    returned: bool = False
    inputs: set[str] = field(default_factory=set)
    dots: set[str] = field(default_factory=set)
    serial: int = field(default_factory=itertools.count().__next__)

    @property
    def end(self) -> int:
        """The address after the last byte."""
        return self.base + int(self.data.size)


@dataclass(frozen=True)
class View:
    """A strided view of a storage, checked against its size. ``offset`` is in bytes, strides in elements."""

    storage: Storage
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements, counted as often as they are addressed."""
        return math.prod(self.shape)

    def values(self) -> torch.Tensor:
        """The elements, as a tensor on the storage's memory."""
        if not self.numel:
            return torch.empty(self.shape, dtype=self.dtype)
        typed = torch.from_numpy(self.storage.data)
        size = self.dtype.itemsize
        typed = typed[: typed.numel() // size * size].view(self.dtype)
        return typed.as_strided(self.shape, self.stride, self.offset // size)

    def flags(self, which: np.ndarray) -> torch.Tensor:
        """One flag per element (that of its first byte) from an array over bytes."""
        return self._bytes(which)[..., 0]

    @property
    def dense(self) -> bool:
        """Whether it is its whole storage, row-major."""
        expected = 1
        for n, s in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if n != 1 and s != expected:
                return False
            expected *= n
        return self.offset == 0 and self.numel * self.dtype.itemsize == self.storage.data.size

    @property
    def apart(self) -> bool:
        """Whether no two elements lie in one place."""
        reach = 0
        for s, n in sorted((s, n) for n, s in zip(self.shape, self.stride, strict=True) if n > 1):
            if s <= reach:
                return False
            reach += s * (n - 1)
        return True

    def mark(self, which: np.ndarray, value: bool | int | torch.Tensor) -> None:
        """Set the flags of every byte of the view: to a constant, or element by element."""
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
    """The kind of number that a dtype's bytes hold, as kernels name it: ``f32``, ``i8``, ``i1``, ...

    Signed and unsigned integers are one kind, and so are a complex number and its parts.
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


def whole(value: Any, what: str, top: int) -> int:
    """A whole number in [0, top).

    Raises:
        TraceError: anything else.
    """
    if type(value) is not int or not 0 <= value < top:
        raise TraceError(f"{what}: {str(value)[:40]!r}")
    return value


_NOWHERE = Storage(0, np.zeros(0, np.uint8), np.zeros(0, bool), np.zeros(0, bool), np.zeros(0, np.uint8))


class Heap:
    """Every storage of one submission, by address; ``blank`` ones begin as zeros."""

    def __init__(self, *, blank: bool = False) -> None:
        self._blank = blank
        self._bases: list[int] = []
        self._held: dict[int, Storage] = {}
        self.bytes = 0

    def __iter__(self) -> Iterator[Storage]:
        return iter([self._held[b] for b in self._bases])

    def allocate(self, base: Any, size: Any) -> Storage:
        """A new storage of unwritten bytes.

        Raises:
            TraceError: it overlaps another one or exceeds the budget.
        """
        base, size = whole(base, "address", TOP), whole(size, "size", MAX_BYTES + 1)
        if self.bytes + size > MAX_BYTES:
            raise TraceError(f"more than {MAX_BYTES >> 30} GiB of memory")
        at = bisect.bisect_right(self._bases, base)
        if at and self._held[self._bases[at - 1]].end > base or at < len(self._bases) and base + size > self._bases[at]:
            raise TraceError("overlapping allocations")
        # Zeros are pages that nobody has touched: what is only counted costs no memory.
        data = np.zeros(size, np.uint8) if self._blank else np.full(size, UNWRITTEN, np.uint8)
        found = Storage(base, data, np.zeros(size, bool), np.zeros(size, bool), np.zeros(size, np.uint8))
        self._bases.insert(at, base)
        self._held[base] = found
        self.bytes += size
        return found

    def free(self, base: Any) -> None:
        """Forget a storage; unknown addresses are nothing to forget."""
        found = self._held.pop(base, None) if type(base) is int else None
        if found is not None:
            self._bases.remove(found.base)
            self.bytes -= int(found.data.size)

    def at(self, address: int) -> Storage | None:
        """The storage that holds an address."""
        k = bisect.bisect_right(self._bases, address) - 1
        found = self._held[self._bases[k]] if k >= 0 else None
        return found if found is not None and address < found.end else None

    def view(self, spec: Any) -> View:
        """Check a view: ``[base, dtype, offset in bytes, shape, strides in elements]``.

        Raises:
            TraceError: unknown storage or dtype, or elements outside of the storage.
        """
        if not isinstance(spec, list) or len(spec) != 5 or not all(isinstance(x, list) for x in spec[3:]):
            raise TraceError("malformed view")
        base, name, offset, shape, stride = spec
        dtype = DTYPES.get(name) if isinstance(name, str) else None
        if dtype is None or len(shape) != len(stride) or len(shape) > MAX_DIMENSIONS:
            raise TraceError("malformed view")
        shape = [whole(n, "shape", MAX_ELEMENTS + 1) for n in shape]
        stride = [whole(n, "stride", TOP) for n in stride]
        numel = math.prod(shape)
        if math.prod(n or 1 for n in shape) >= TOP:  # no tensor has such strides, not even an empty one
            raise TraceError("view of too many elements")
        if not numel:
            return View(_NOWHERE, dtype, 0, tuple(shape), tuple(stride))
        found = self._held.get(base) if type(base) is int else None
        if found is None:
            raise TraceError("view of unknown memory")
        offset = whole(offset, "offset", int(found.data.size) + 1)
        span = (1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))) * dtype.itemsize
        if numel > MAX_ELEMENTS or offset % dtype.itemsize or offset + span > found.data.size:
            raise TraceError("view outside of its memory")
        return View(found, dtype, offset, tuple(shape), tuple(stride))
