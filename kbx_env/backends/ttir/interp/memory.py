"""The flat memory of a launch: named regions, checked gathers and scatters."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kbx_env.backends.ttir.interp.hooks import Extent as Extent
from kbx_env.backends.ttir.interp.hooks import LaunchWatch, LoadHook, Pick, StoreHook
from kbx_env.backends.ttir.interp.traffic import Meter as Meter
from kbx_env.backends.ttir.sanitizer.shadow import Array as Array
from kbx_env.backends.ttir.sanitizer.shadow import alignment_and_stride, any_nonzero, in_order, mark


@dataclass(frozen=True)
class Region:
    """One buffer.

    Attributes:
        base: Address of the first byte.
        data: The bytes: uint8, one-dimensional, writable; may be empty.
        name: Name used in messages.
        initialised: Whether each byte was ever written: bool, shape of ``data``; ``None`` when all were. The array
            belongs to the caller; launches with a sanitizer read it and set the bytes that they store.
        extents: The bytes that pointer arguments into this buffer may touch, by default all.
        stored: Set where a launch stores: bool, shape of ``data``; ``None`` to leave it out.
    """

    base: int
    data: np.ndarray
    name: str = ""
    initialised: np.ndarray | None = None
    extents: tuple[Extent, ...] = ()
    stored: np.ndarray | None = None


class BadAddress(Exception):
    """Internal: an unmasked lane accesses bytes outside every region.

    Args:
        position: Flat position of the first such lane.
        address: Its address.
    """

    def __init__(self, position: int, address: int) -> None:
        self.position, self.address = position, address
        super().__init__(address)


def _picker(shape: tuple[int, ...], mask: Array | None, here: Array | None, lanes: int) -> Pick:
    """Build the ``Pick`` of an access.

    Args:
        shape: Shape of the access, (programs or 1, ...).
        mask: Its unmasked lanes, of that shape.
        here: Which of the unmasked lanes lie in the region: (unmasked lanes,).
        lanes: How many these are.

    Returns:
        The function.
    """

    def pick(v: Array, shared: int) -> Array:
        if len(v) != shape[0]:
            v = np.full(1, shared, v.dtype)
        if len(v) == 1:
            return np.full(lanes, v[0])
        wide = np.broadcast_to(v.reshape((-1,) + (1,) * (len(shape) - 1)), shape)
        flat = wide.reshape(-1) if mask is None else wide[mask]
        return flat if here is None else flat[here]

    return pick


def _alike(*arrays: Array) -> Sequence[Array]:
    """Broadcast arrays against each other; those of one shape are returned as they are, which is much faster."""
    shape = arrays[0].shape
    return arrays if all(a.shape == shape for a in arrays) else np.broadcast_arrays(*arrays)


def _with_masked_lanes(values: Array, mask: Array, other: Any) -> Array:
    """Put loaded elements into their lanes.

    Args:
        values: The elements of the unmasked lanes: (lanes,).
        mask: Which lanes these are.
        other: Value of the other lanes, broadcastable with ``mask``; ``None`` for 0.

    Returns:
        The broadcast shape of ``mask`` and ``other``.
    """
    out = np.empty(mask.shape, values.dtype)
    wide = other is not None and other.size > 1 and np.broadcast_shapes(mask.shape, other.shape) != mask.shape
    out[...] = 0 if other is None or wide else other
    out[mask] = values
    return np.where(mask, out, other) if wide else out


class Memory:
    """All regions of a launch.

    Args:
        regions: The regions, which do not overlap.

    Attributes:
        regions: The regions that are not empty, by ascending address.
        bases: Addresses of their first bytes: int64, (regions,).
        ends: Addresses behind their last bytes: int64, (regions,).
        views: Views of the regions' bytes by region and dtype.
        all_regions: All regions in the caller's order, empty ones included.
        args: Runtime arguments of the launch.
        names: Names of the runtime arguments.
        labels: Names of the tensors that arguments point to, filled by ``label``.
        watch: The sanitizer's watch, if there is one.
        stray: Distance in bytes from the nearest region up to which a load outside gives 0 and a store does nothing.
        first_lane_wins: Whether of several lanes that one operation stores to one address the first one counts.
    """

    stray = 0
    first_lane_wins = False

    def __init__(self, regions: Sequence[Region]) -> None:
        self.regions = sorted((r for r in regions if r.data.size), key=lambda r: r.base)
        self.bases = np.array([r.base for r in self.regions], np.int64)
        self.ends = np.array([r.base + r.data.size for r in self.regions], np.int64)
        self._starts: list[int] = self.bases.tolist()
        self.views: dict[tuple[int, np.dtype[Any]], Array] = {}
        # Addresses of the data in this process, 1 where it is not contiguous. Kept because ``ctypes.data`` takes longer
        # than a small access.
        self.aligned = [r.data.ctypes.data if r.data.flags.c_contiguous else 1 for r in self.regions]
        self.all_regions = list(regions)
        self.args: Sequence[Any] = ()
        self.names: Sequence[str] = ()
        self.labels: dict[int, str] = {}
        self.watch: LaunchWatch | None = None

    def noting(self, meter: Meter, size: int, then: LoadHook | None) -> LoadHook:
        """Return a hook that reports loads to a meter before it calls another hook.

        Args:
            meter: The meter.
            size: Bytes of one element.
            then: The other hook.

        Returns:
            The hook.
        """

        def hook(k: int, offsets: Array, pick: Pick) -> None:
            meter.seen(k, self.regions[k].data.size, offsets, size)
            if then is not None:
                then(k, offsets, pick)

        return hook

    def address(self, arg: int) -> int:
        """Return the address in a pointer argument, or the base address of a descriptor."""
        return int(getattr(self.args[arg], "base", self.args[arg]))

    # -- tensors -----------------------------------------------------------------------
    def extent(self, arg: int) -> Extent:
        """Return the bytes that a pointer argument may touch: by default the whole buffer that it points into."""
        for r in self.all_regions:
            for e in r.extents:
                if e.arg == arg:
                    return e if e.name else Extent(arg, e.start, e.size, self._named(arg, r.name))
        at = self.address(arg)
        k = int(np.searchsorted(self.bases, at, "right")) - 1
        if k >= 0 and at < self.ends[k]:
            r = self.regions[k]
            return Extent(arg, r.base, r.data.size, self._named(arg, r.name))
        empty = next((r.name for r in self.all_regions if not r.data.size and r.base == at), "")
        return Extent(arg, at, 0, self._named(arg, empty))

    def _named(self, arg: int, default: str) -> str:
        return (self.names[arg] if arg < len(self.names) else "") or default or f"argument {arg}"

    def label(self, arg: int) -> str:
        """Return the name of the tensor that a pointer argument points to."""
        if arg not in self.labels:
            self.labels[arg] = self.extent(arg).name
        return self.labels[arg]

    def nearest(self, address: int, size: int) -> tuple[str, int, int]:
        """Return the region nearest to an access.

        Args:
            address: First byte of the access.
            size: Number of its bytes.

        Returns:
            The region's name, the distance in bytes and its base address.
        """
        best = ("", 0, address)
        for r, end in zip(self.regions, self.ends.tolist(), strict=True):
            by = max(r.base - address, address + size - end)
            if best[0] == "" or by < best[1]:
                best = (r.name or "a buffer", by, r.base)
        return best

    def _view(self, k: int, dtype: np.dtype[Any]) -> Array:
        key = (k, dtype)
        view = self.views.get(key)
        if view is None:
            data = self.regions[k].data
            view = data[: data.size // dtype.itemsize * dtype.itemsize].view(dtype)
            self.views[key] = view
        return view

    def _reachable(self, addr: Array, mask: Array | None, size: int) -> tuple[Array, Array | None]:
        """Leave out the lanes outside of every region, where stray accesses are tolerated.

        Args:
            addr: Byte addresses: int64, any shape.
            mask: Lanes that take part, broadcastable with ``addr``; ``None`` for all.
            size: Bytes of one element.

        Returns:
            Addresses, and the mask of the lanes that are left, of one shape; ``None`` for all lanes.

        Raises:
            BadAddress: an unmasked lane is further than ``stray`` from every region.
        """
        if mask is not None:
            addr, mask = _alike(addr, mask)
        if not self.stray:
            return addr, mask
        owner = np.searchsorted(self.bases, addr, "right") - 1
        inside = np.zeros(addr.shape, bool)
        if len(self.bases):
            inside = (owner >= 0) & (addr <= self.ends[np.maximum(owner, 0)] - size)
        outside = ~inside if mask is None else mask & ~inside
        if not outside.any():
            return addr, mask
        far = np.full(addr.shape, np.iinfo(np.int64).max)
        for start, end in zip(self.bases, self.ends, strict=True):
            far = np.minimum(far, np.maximum(start - addr, addr - (end - size)))
        lost = outside & (far > self.stray)
        if lost.any():
            at = int(np.argmax(lost))
            raise BadAddress(at, int(addr.reshape(-1)[at]))
        return addr, inside if mask is None else mask & inside

    def _span(self, addr: Array, mask: Array | None, size: int, within: Sequence[Extent] = ()) -> int:
        """Check an access and return the region that holds all of it.

        Args:
            addr: Byte addresses: int64, any shape.
            mask: Lanes that take part, of that shape; ``None`` for all.
            size: Bytes of one element.
            within: If not empty, every unmasked lane must be inside one of these extents.

        Returns:
            Index of the region, -1 when there are several.

        Raises:
            BadAddress: an unmasked lane is outside every region, or outside every extent.
        """
        if mask is None:
            lo, hi = int(addr.min()), int(addr.max())
        else:
            big = np.iinfo(np.int64)
            lo = int(addr.min(where=mask, initial=big.max))
            hi = int(addr.max(where=mask, initial=big.min))
        if within and not any(e.start <= lo and hi + size <= e.start + e.size for e in within):
            ok = np.zeros(addr.shape, bool)
            for e in within:
                ok |= (addr >= e.start) & (addr <= e.start + e.size - size)
            bad = ~ok if mask is None else mask & ~ok
            if bad.any():
                at = int(np.argmax(bad))
                raise BadAddress(at, int(addr.reshape(-1)[at]))
        k = int(np.searchsorted(self.bases, lo, "right")) - 1
        if k >= 0 and hi + size <= self.ends[k]:
            return k
        owner = np.searchsorted(self.bases, addr, "right") - 1
        if len(self.bases):
            # The size is not added to addresses: the largest ones would become negative.
            bad = (owner < 0) | (addr > self.ends[np.maximum(owner, 0)] - size)
        else:
            bad = np.ones(addr.shape, bool)
        if mask is not None:
            bad &= mask
        if bad.any():
            at = int(np.argmax(bad))
            raise BadAddress(at, int(addr.reshape(-1)[at]))
        return -1

    def _single_region(self, addresses: Array, size: int, within: Sequence[Extent]) -> tuple[int, Array] | None:
        """Find the region that holds all of an access, as nearly all do.

        Args:
            addresses: Of the unmasked lanes: int64, (lanes,), at least one.
            size: Bytes of one element.
            within: Extents, one of which must hold all of the access, if there are any.

        Returns:
            The region's index and the byte offsets in it: (lanes,); ``None`` for any other access: ``_span`` looks at its lanes.
        """
        k = bisect.bisect_right(self._starts, int(addresses[0])) - 1
        if k < 0:
            return None
        base = self._starts[k]
        offsets = addresses - base
        step = alignment_and_stride(offsets)[1]
        if len(offsets) == 1 or step > 0:
            low, high = int(offsets[0]), int(offsets[-1]) + size
        else:
            low, high = int(offsets.min()), int(offsets.max()) + size
        if low < 0 or high > self.regions[k].data.size:
            return None
        if within and not any(e.start <= base + low and base + high <= e.start + e.size for e in within):
            return None
        return k, offsets

    def load(
        self,
        addr: Array,
        mask: Array | None,
        dtype: np.dtype[Any],
        other: Any = None,
        within: Sequence[Extent] = (),
        hook: LoadHook | None = None,
    ) -> Array:
        """Read one element per lane.

        Args:
            addr: Byte addresses: int64, any shape.
            mask: Lanes to read, broadcastable with ``addr``; ``None`` for all.
            dtype: Type of an element.
            other: Value of masked lanes, broadcastable likewise; ``None`` for 0.
            within: If not empty, every unmasked lane must be inside one of these extents.
            hook: Called with the unmasked lanes of each region before they are read.

        Returns:
            The elements: dtype ``dtype``, the broadcast shape of ``addr``, ``mask`` and ``other``.

        Raises:
            BadAddress: an unmasked lane is outside every region, or outside every extent.
        """
        addr, mask = self._reachable(addr, mask, dtype.itemsize)
        if mask is not None:
            on = np.count_nonzero(mask)
            if not on:
                fill = np.zeros((1,) * addr.ndim, dtype) if other is None else other
                return np.broadcast_to(fill, np.broadcast_shapes(addr.shape, fill.shape))
            if on == mask.size:
                mask = None
        if not addr.size:
            return np.zeros(addr.shape, dtype)
        flat = addr.reshape(-1) if mask is None else addr[mask]
        if (found := self._single_region(flat, dtype.itemsize, within)) is not None:
            if hook is not None:
                hook(*found, _picker(addr.shape, mask, None, len(flat)))
            values = self.gather(*found, dtype)
            return values.reshape(addr.shape) if mask is None else _with_masked_lanes(values, mask, other)
        return self._load_by_lanes(addr, mask, dtype, other, within, hook)

    def _load_by_lanes(
        self, addr: Array, mask: Array | None, dtype: np.dtype[Any], other: Any, within: Sequence[Extent], hook: LoadHook | None
    ) -> Array:  # fmt: skip
        """Read one element per lane from several regions or extents; arguments as for ``load``, of one shape."""
        k = self._span(addr, mask, dtype.itemsize, within)
        if hook is not None:
            self._call_hook(k, addr, mask, hook)
        if k >= 0:
            idx = addr - self.regions[k].base
            if mask is not None:
                idx = np.where(mask, idx, 0)
            out = self.gather(k, idx, dtype)
        else:
            out = np.zeros(addr.shape, dtype)
            owner = np.searchsorted(self.bases, addr, "right") - 1
            for k in range(len(self.regions)):
                here = owner == k
                if mask is not None:
                    here &= mask
                if here.any():
                    out[here] = self.gather(k, addr[here] - self.regions[k].base, dtype)
        if mask is not None:
            fill = np.zeros((), dtype) if other is None else other
            out = np.where(mask, out, fill)
        return out

    def gather(self, k: int, idx: Array, dtype: np.dtype[Any]) -> Array:
        """Read elements of one region without a check.

        Args:
            k: Index of the region.
            idx: Byte offsets into it: int64, any shape.
            dtype: Type of an element.

        Returns:
            The elements: dtype ``dtype``, shape of ``idx``.
        """
        size = dtype.itemsize
        data = self.regions[k].data
        if size == 1:
            return data.view(np.int8 if dtype.kind == "b" else dtype)[idx].astype(dtype, copy=False)
        low_bits = alignment_and_stride(idx)[0] if idx.ndim == 1 and idx.size else int(np.bitwise_or.reduce(idx, axis=None))
        if not low_bits & (size - 1) and self.aligned[k] % size == 0:
            view, shift = self._view(k, dtype), size.bit_length() - 1
            if idx.ndim == 1 and in_order(idx, size):
                first = int(idx[0]) >> shift
                return view[first : first + len(idx)].copy()
            return view.take(idx >> shift)
        raw = data[idx[..., None] + np.arange(size)]
        return np.ascontiguousarray(raw).view(dtype)[..., 0]

    def _call_hook(self, k: int, addr: Array, mask: Array | None, hook: LoadHook) -> None:
        """Call a hook for each region that an access reads; ``k`` is the only region, or -1."""
        flat = addr.reshape(-1) if mask is None else addr[mask]
        owner = np.searchsorted(self.bases, flat, "right") - 1 if k < 0 else None
        for j in [k] if owner is None else np.unique(owner).tolist():
            here = None if owner is None else owner == j
            own = flat if here is None else flat[here]
            hook(j, own - self.regions[j].base, _picker(addr.shape, mask, here, len(own)))

    def store(
        self,
        addr: Array,
        value: Array,
        mask: Array | None,
        within: Sequence[Extent] = (),
        hook: StoreHook | None = None,
    ) -> None:
        """Write one element per lane; of several lanes with one address the last one counts, or the first one
        (``first_lane_wins``).

        Args:
            addr: Byte addresses: int64, any shape.
            value: The elements, broadcastable with ``addr``.
            mask: Lanes to write, broadcastable likewise; ``None`` for all.
            within: If not empty, every unmasked lane must be inside one of these extents.
            hook: Called with the unmasked lanes of each region before they are written.

        Raises:
            BadAddress: an unmasked lane is outside every region, or outside every extent.
        """
        if mask is not None:
            addr, value, mask = _alike(addr, value, mask)
            if np.count_nonzero(mask) == mask.size:
                mask = None
        else:
            addr, value = _alike(addr, value)
        addr, mask = self._reachable(addr, mask, value.dtype.itemsize)
        if not addr.size or (mask is not None and not np.count_nonzero(mask)):
            return
        size = value.dtype.itemsize
        shape = addr.shape
        flat, values = (addr.reshape(-1), value.reshape(-1)) if mask is None else (addr[mask], value[mask])
        if (found := self._single_region(flat, size, within)) is not None:
            k, offsets = found
            after = hook(k, offsets, values, _picker(shape, mask, None, len(offsets))) if hook is not None else None
            self._scatter(k, offsets, values)
            self._mark_stored(k, offsets, size)
            if after is not None:
                after()
            return
        k = self._span(addr, mask, size, within)
        if mask is not None:
            addr, value = flat, values
        owner = np.searchsorted(self.bases, addr, "right") - 1 if k < 0 else None
        for j in [k] if owner is None else np.unique(owner).tolist():
            here = None if owner is None else owner == j
            idx, v = (addr, value) if here is None else (addr[here], value[here])
            idx = idx - self.regions[j].base
            chosen = None if here is None else here.reshape(-1)
            pick = _picker(shape, mask, chosen, idx.size)
            after = hook(j, idx.reshape(-1), v.reshape(-1), pick) if hook is not None else None
            self._scatter(j, idx, v)
            self._mark_stored(j, idx, size)
            if after is not None:
                after()

    def _mark_stored(self, k: int, idx: Array, size: int) -> None:
        stored = self.regions[k].stored
        if stored is not None and idx.size:
            mark(stored, idx.reshape(-1), size)

    def _scatter(self, k: int, idx: Array, value: Array) -> None:
        dtype = value.dtype
        size = dtype.itemsize
        data = self.regions[k].data
        if self.first_lane_wins:
            idx, value = idx.reshape(-1)[::-1], value.reshape(-1)[::-1]
        if size == 1:
            data.view(np.int8 if dtype.kind == "b" else dtype)[idx] = value
        elif self.aligned[k] % size == 0 and idx.ndim == 1 and in_order(idx, size) and not int(idx[0]) & (size - 1):
            first = int(idx[0]) >> (size.bit_length() - 1)
            self._view(k, dtype)[first : first + len(idx)] = value
        elif self.aligned[k] % size == 0 and not any_nonzero(idx & (size - 1)):
            self._view(k, dtype)[idx >> (size.bit_length() - 1)] = value
        else:
            raw = np.ascontiguousarray(value).reshape(-1)[:, None].view(np.uint8)
            data[idx.reshape(-1)[:, None] + np.arange(size)] = raw

    def locate(
        self, addr: Array, dtype: np.dtype[Any], within: Sequence[Extent] = ()
    ) -> list[tuple[int, Array, Array, Array]]:
        """Split the lanes of an atomic operation by region.

        Args:
            addr: Byte addresses of the unmasked lanes: int64, (lanes,).
            dtype: Type of an element.
            within: If not empty, every lane must be inside one of these extents.

        Returns:
            For each region: its index, a view of its elements (dtype ``dtype``), and of each lane in it the element's
            index and the lane's number.

        Raises:
            BadAddress: an address is outside every region, outside every extent, or not a multiple of the element size.
        """
        if not addr.size:
            return []
        size = dtype.itemsize
        near = self._reachable(addr, None, size)[1]
        if near is None:
            self._span(addr, None, size, within)
        owner = np.searchsorted(self.bases, addr, "right") - 1
        out = []
        for k in np.unique(owner if near is None else owner[near]).tolist():
            where = np.nonzero(owner == k if near is None else near & (owner == k))[0]
            idx = addr[where] - self.regions[k].base
            unaligned = idx % size != 0
            if unaligned.any():
                at = int(where[int(np.argmax(unaligned))])
                raise BadAddress(at, int(addr[at]))
            self._mark_stored(k, idx, size)
            out.append((k, self._view(k, dtype), idx // size, where))
        return out
