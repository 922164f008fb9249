"""The flat memory of a launch: named regions, checked gathers and scatters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Region:
    """One buffer.

    Attributes:
        base: Address of the first byte.
        data: Writable one-dimensional uint8 view of the bytes.
        name: Name used in messages.
    """

    base: int
    data: np.ndarray
    name: str = ""


@dataclass
class Meter:
    """What launches did, summed over launches.

    Attributes:
        launches: Number of launches.
        loaded_bytes: Bytes read by unmasked lanes.
        stored_bytes: Bytes written by unmasked lanes.
        dot_flops: Floating point or integer operations of matrix products.
        dot_kinds: Kinds of matrix products, such as "f16*f16->f32" or "tf32".
        atomics: Unmasked lanes of atomic operations.
        ops: Names of the operations executed.
    """

    launches: int = 0
    loaded_bytes: int = 0
    stored_bytes: int = 0
    dot_flops: int = 0
    dot_kinds: set[str] = field(default_factory=set)
    atomics: int = 0
    ops: set[str] = field(default_factory=set)


class BadAddress(Exception):
    """Internal: the flat position of the first bad lane and its address."""

    def __init__(self, position: int, address: int) -> None:
        self.position, self.address = position, address
        super().__init__(address)


class Memory:
    """The union of regions."""

    def __init__(self, regions: Sequence[Region]) -> None:
        self.regions = sorted((r for r in regions if r.data.size), key=lambda r: r.base)
        self.bases = np.array([r.base for r in self.regions], np.int64)
        self.ends = np.array([r.base + r.data.size for r in self.regions], np.int64)
        self.views: dict[tuple[int, str, int], Array] = {}

    def nearest(self, address: int, size: int) -> tuple[str, int]:
        """Return the name of the region nearest to an access and its distance in bytes."""
        best = ("", 0)
        for r, end in zip(self.regions, self.ends.tolist(), strict=True):
            by = max(r.base - address, address + size - end)
            if not best[1] or by < best[1]:
                best = (r.name, by)
        return best

    def _view(self, k: int, dtype: np.dtype[Any]) -> Array:
        key = (k, dtype.name, dtype.itemsize)
        view = self.views.get(key)
        if view is None:
            data = self.regions[k].data
            view = data[: data.size // dtype.itemsize * dtype.itemsize].view(dtype)
            self.views[key] = view
        return view

    def _span(self, addr: Array, mask: Array | None, size: int) -> int:
        """Return the region that holds every unmasked access, -1 when there are several.

        Raises:
            BadAddress: an unmasked access is outside every region.
        """
        if mask is None:
            lo, hi = int(addr.min()), int(addr.max())
        else:
            big = np.iinfo(np.int64)
            lo = int(addr.min(where=mask, initial=big.max))
            hi = int(addr.max(where=mask, initial=big.min))
        k = int(np.searchsorted(self.bases, lo, "right")) - 1
        if k >= 0 and hi + size <= self.ends[k]:
            return k
        owner = np.searchsorted(self.bases, addr, "right") - 1
        if len(self.bases):
            bad = (owner < 0) | (addr + size > self.ends[np.maximum(owner, 0)])
        else:
            bad = np.ones(addr.shape, bool)
        if mask is not None:
            bad &= mask
        if bad.any():
            at = int(np.argmax(bad))
            raise BadAddress(at, int(addr.reshape(-1)[at]))
        return -1

    def load(self, addr: Array, mask: Array | None, dtype: np.dtype[Any], other: Any = None) -> Array:
        """Read one element per lane; masked lanes give ``other`` (0 when None)."""
        if mask is not None:
            addr, mask = np.broadcast_arrays(addr, mask)
            if not mask.any():
                fill = np.zeros((1,) * addr.ndim, dtype) if other is None else other
                return np.broadcast_to(fill, np.broadcast_shapes(addr.shape, fill.shape))
            if mask.all():
                mask = None
        if not addr.size:
            return np.zeros(addr.shape, dtype)
        size = dtype.itemsize
        k = self._span(addr, mask, size)
        if k >= 0:
            idx = addr - self.regions[k].base
            if mask is not None:
                idx = np.where(mask, idx, 0)
            out = self._gather(k, idx, dtype)
        else:
            out = np.zeros(addr.shape, dtype)
            owner = np.searchsorted(self.bases, addr, "right") - 1
            for k in range(len(self.regions)):
                here = owner == k
                if mask is not None:
                    here &= mask
                if here.any():
                    out[here] = self._gather(k, addr[here] - self.regions[k].base, dtype)
        if mask is not None:
            fill = np.zeros((), dtype) if other is None else other
            out = np.where(mask, out, fill)
        return out

    def _gather(self, k: int, idx: Array, dtype: np.dtype[Any]) -> Array:
        size = dtype.itemsize
        data = self.regions[k].data
        if size == 1:
            return data.view(np.int8 if dtype.kind == "b" else dtype)[idx].astype(dtype, copy=False)
        if not (idx & (size - 1)).any() and data.ctypes.data % size == 0 and data.flags.c_contiguous:
            return np.take(self._view(k, dtype), idx >> (size.bit_length() - 1))
        raw = data[idx[..., None] + np.arange(size)]
        return np.ascontiguousarray(raw).view(dtype)[..., 0]

    def store(self, addr: Array, value: Array, mask: Array | None) -> None:
        """Write one element per lane, the last of several lanes with one address wins."""
        if mask is not None:
            addr, value, mask = np.broadcast_arrays(addr, value, mask)
            if mask.all():
                mask = None
        else:
            addr, value = np.broadcast_arrays(addr, value)
        if not addr.size or (mask is not None and not mask.any()):
            return
        size = value.dtype.itemsize
        k = self._span(addr, mask, size)
        if mask is not None:
            addr, value = addr[mask], value[mask]
        if k >= 0:
            self._scatter(k, addr - self.regions[k].base, value)
            return
        owner = np.searchsorted(self.bases, addr, "right") - 1
        for k in range(len(self.regions)):
            here = owner == k
            if here.any():
                self._scatter(k, addr[here] - self.regions[k].base, value[here])

    def _scatter(self, k: int, idx: Array, value: Array) -> None:
        dtype = value.dtype
        size = dtype.itemsize
        data = self.regions[k].data
        if size == 1:
            data.view(np.int8 if dtype.kind == "b" else dtype)[idx] = value
        elif not (idx & (size - 1)).any() and data.ctypes.data % size == 0 and data.flags.c_contiguous:
            self._view(k, dtype)[idx >> (size.bit_length() - 1)] = value
        else:
            raw = np.ascontiguousarray(value).reshape(-1)[:, None].view(np.uint8)
            data[idx.reshape(-1)[:, None] + np.arange(size)] = raw

    def locate(self, addr: Array, dtype: np.dtype[Any]) -> list[tuple[Array, Array, Array]]:
        """Split flat addresses into (typed view, element index, positions) per region.

        Raises:
            BadAddress: an address is outside every region or unaligned.
        """
        if not addr.size:
            return []
        size = dtype.itemsize
        self._span(addr, None, size)
        owner = np.searchsorted(self.bases, addr, "right") - 1
        out = []
        for k in np.unique(owner).tolist():
            where = np.nonzero(owner == k)[0]
            idx = addr[where] - self.regions[k].base
            odd = idx % size != 0
            if odd.any():
                at = int(where[int(np.argmax(odd))])
                raise BadAddress(at, int(addr[at]))
            out.append((self._view(k, dtype), idx // size, where))
        return out
