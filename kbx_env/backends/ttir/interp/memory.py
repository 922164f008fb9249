"""The flat memory of a launch: named regions, checked gathers and scatters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from kbx_env.backends.ttir.interp.traffic import Meter as Meter
from kbx_env.backends.ttir.sanitizer.shadow import Array as Array
from kbx_env.backends.ttir.sanitizer.shadow import mark

if TYPE_CHECKING:
    from kbx_env.backends.ttir.sanitizer.sanitizer import Watch

#: Gives the entry of each lane of an access from an array over programs, or the number given as
#: second where one lane stands for every program.
Pick = Callable[[Array, int], Array]
#: Called with (region, byte offsets, pick) before an access. A store passes its values as well and
#: calls what it gets back, if anything, once they are written.
LoadHook = Callable[[int, Array, Pick], None]
StoreHook = Callable[[int, Array, Array, Pick], Callable[[], None] | None]


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


@dataclass(frozen=True)
class Region:
    """One buffer.

    Attributes:
        base: Address of the first byte.
        data: Writable one-dimensional uint8 view of the bytes; may be empty.
        name: Name used in messages.
        initialised: Bool per byte, whether it was ever written; None when all were. It belongs to
            the caller; launches with a sanitizer read it and set what they store.
        extents: What pointer arguments into this buffer may touch, by default all of it.
        stored: Bool per byte, set where a launch stores; None when nobody asks.
    """

    base: int
    data: np.ndarray
    name: str = ""
    initialised: np.ndarray | None = None
    extents: tuple[Extent, ...] = ()
    stored: np.ndarray | None = None


class BadAddress(Exception):
    """Internal: the flat position of the first bad lane and its address."""

    def __init__(self, position: int, address: int) -> None:
        self.position, self.address = position, address
        super().__init__(address)


def _picker(shape: tuple[int, ...], mask: Array | None, here: Array | None) -> Pick:
    def pick(v: Array, shared: int) -> Array:
        if len(v) != shape[0]:
            v = np.full(1, shared, v.dtype)
        wide = np.broadcast_to(v.reshape((-1,) + (1,) * (len(shape) - 1)), shape)
        flat = wide.reshape(-1) if mask is None else wide[mask]
        return flat if here is None else flat[here]

    return pick


class Memory:
    """The union of regions."""

    def __init__(self, regions: Sequence[Region]) -> None:
        self.regions = sorted((r for r in regions if r.data.size), key=lambda r: r.base)
        self.bases = np.array([r.base for r in self.regions], np.int64)
        self.ends = np.array([r.base + r.data.size for r in self.regions], np.int64)
        self.views: dict[tuple[int, np.dtype[Any]], Array] = {}
        # Asking numpy for these at every access would take longer than a small access.
        self.aligned = [r.data.ctypes.data if r.data.flags.c_contiguous else 1 for r in self.regions]
        self.given = list(regions)
        self.args: Sequence[Any] = ()
        self.names: Sequence[str] = ()
        self.labels: dict[int, str] = {}
        self.watch: Watch | None = None

    def noting(self, meter: Meter, size: int, then: LoadHook | None) -> LoadHook:
        """Return a hook that tells a meter what is loaded, before another hook."""

        def hook(k: int, offsets: Array, pick: Pick) -> None:
            meter.seen(k, self.regions[k].data.size, offsets, size)
            if then is not None:
                then(k, offsets, pick)

        return hook

    def address(self, arg: int) -> int:
        """Return where a pointer argument points to, or where a descriptor's tensor begins."""
        return int(getattr(self.args[arg], "base", self.args[arg]))

    # -- tensors -----------------------------------------------------------------------
    def extent(self, arg: int) -> Extent:
        """Return what a pointer argument may touch: by default the whole buffer it points into."""
        for r in self.given:
            for e in r.extents:
                if e.arg == arg:
                    return e if e.name else Extent(arg, e.start, e.size, self._named(arg, r.name))
        at = self.address(arg)
        k = int(np.searchsorted(self.bases, at, "right")) - 1
        if k >= 0 and at < self.ends[k]:
            r = self.regions[k]
            return Extent(arg, r.base, r.data.size, self._named(arg, r.name))
        empty = next((r.name for r in self.given if not r.data.size and r.base == at), "")
        return Extent(arg, at, 0, self._named(arg, empty))

    def _named(self, arg: int, default: str) -> str:
        return (self.names[arg] if arg < len(self.names) else "") or default or f"argument {arg}"

    def label(self, arg: int) -> str:
        """Return the name of the tensor that a pointer argument points to."""
        if arg not in self.labels:
            self.labels[arg] = self.extent(arg).name
        return self.labels[arg]

    def nearest(self, address: int, size: int) -> tuple[str, int, int]:
        """Return the region nearest to an access: its name, the distance in bytes and its base."""
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

    def _span(self, addr: Array, mask: Array | None, size: int, within: Sequence[Extent] = ()) -> int:
        """Return the region that holds every unmasked access, -1 when there are several.

        With ``within``, every unmasked access must be inside one of these extents.

        Raises:
            BadAddress: an unmasked access is outside every region.
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
                ok |= (addr >= e.start) & (addr + size <= e.start + e.size)
            bad = ~ok if mask is None else mask & ~ok
            if bad.any():
                at = int(np.argmax(bad))
                raise BadAddress(at, int(addr.reshape(-1)[at]))
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

    def load(
        self,
        addr: Array,
        mask: Array | None,
        dtype: np.dtype[Any],
        other: Any = None,
        within: Sequence[Extent] = (),
        hook: LoadHook | None = None,
    ) -> Array:
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
        k = self._span(addr, mask, size, within)
        if hook is not None:
            self._tell(k, addr, mask, hook)
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
        if not (idx & (size - 1)).any() and self.aligned[k] % size == 0:
            return np.take(self._view(k, dtype), idx >> (size.bit_length() - 1))
        raw = data[idx[..., None] + np.arange(size)]
        return np.ascontiguousarray(raw).view(dtype)[..., 0]

    def _tell(self, k: int, addr: Array, mask: Array | None, hook: LoadHook) -> None:
        flat = addr.reshape(-1) if mask is None else addr[mask]
        owner = np.searchsorted(self.bases, flat, "right") - 1 if k < 0 else None
        for j in [k] if owner is None else np.unique(owner).tolist():
            here = None if owner is None else owner == j
            hook(j, (flat if here is None else flat[here]) - self.regions[j].base, _picker(addr.shape, mask, here))

    def store(
        self,
        addr: Array,
        value: Array,
        mask: Array | None,
        within: Sequence[Extent] = (),
        hook: StoreHook | None = None,
    ) -> None:
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
        k = self._span(addr, mask, size, within)
        shape = addr.shape
        if mask is not None:
            addr, value = addr[mask], value[mask]
        owner = np.searchsorted(self.bases, addr, "right") - 1 if k < 0 else None
        for j in [k] if owner is None else np.unique(owner).tolist():
            here = None if owner is None else owner == j
            idx, v = (addr, value) if here is None else (addr[here], value[here])
            idx = idx - self.regions[j].base
            flat = None if here is None else here.reshape(-1)
            after = hook(j, idx.reshape(-1), v.reshape(-1), _picker(shape, mask, flat)) if hook is not None else None
            self._scatter(j, idx, v)
            self._note(j, idx, size)
            if after is not None:
                after()

    def _note(self, k: int, idx: Array, size: int) -> None:
        stored = self.regions[k].stored
        if stored is not None and idx.size:
            mark(stored, idx.reshape(-1), size)

    def _scatter(self, k: int, idx: Array, value: Array) -> None:
        dtype = value.dtype
        size = dtype.itemsize
        data = self.regions[k].data
        if size == 1:
            data.view(np.int8 if dtype.kind == "b" else dtype)[idx] = value
        elif not (idx & (size - 1)).any() and self.aligned[k] % size == 0:
            self._view(k, dtype)[idx >> (size.bit_length() - 1)] = value
        else:
            raw = np.ascontiguousarray(value).reshape(-1)[:, None].view(np.uint8)
            data[idx.reshape(-1)[:, None] + np.arange(size)] = raw

    def locate(
        self, addr: Array, dtype: np.dtype[Any], within: Sequence[Extent] = ()
    ) -> list[tuple[int, Array, Array, Array]]:
        """Split flat addresses into (region, typed view, element index, positions) per region.

        Raises:
            BadAddress: an address is outside every region or unaligned.
        """
        if not addr.size:
            return []
        size = dtype.itemsize
        self._span(addr, None, size, within)
        owner = np.searchsorted(self.bases, addr, "right") - 1
        out = []
        for k in np.unique(owner).tolist():
            where = np.nonzero(owner == k)[0]
            idx = addr[where] - self.regions[k].base
            odd = idx % size != 0
            if odd.any():
                at = int(where[int(np.argmax(odd))])
                raise BadAddress(at, int(addr[at]))
            # Only atomic operations come here, and they write.
            self._note(k, idx, size)
            out.append((k, self._view(k, dtype), idx // size, where))
        return out
