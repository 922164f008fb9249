"""Arrays that describe the bytes of a buffer: which programs accessed them, and whether they were written."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def any_nonzero(x: Array) -> bool:
    """Return whether an array has an element that is not zero; on small arrays three times faster than its method ``any``."""
    return bool(np.count_nonzero(x))


class _LastOffsets:
    """The offsets that were looked at last, and what was found: each part of an access asks for the same ones."""

    offsets: Array | None = None
    found: tuple[int, int] = 0, 0


def alignment_and_stride(offsets: Array) -> tuple[int, int]:
    """Return how byte offsets are aligned, and the distance between neighbours if all have the same.

    Args:
        offsets: (n,) with n > 0. Nobody changes them afterwards.

    Returns:
        A number that is a multiple of a power of two exactly if all offsets are; and the distance in bytes, 0 where neighbours
        have different ones or there is one offset.
    """
    if _LastOffsets.offsets is offsets:
        return _LastOffsets.found
    n, first = len(offsets), int(offsets[0])
    step = int(offsets[1]) - first if n > 1 else 0
    # The last offset first: it tells nearly all others at a fraction of the time.
    even = step != 0 and int(offsets[-1]) - first == step * (n - 1)
    if even and np.count_nonzero(offsets[1:] - offsets[:-1] != step):
        even = False
    if n == 1 or even:
        found = first | step, step
    else:
        found = int(np.bitwise_or.reduce(offsets)), 0
    _LastOffsets.offsets, _LastOffsets.found = offsets, found
    return found


def in_order(offsets: Array, size: int) -> bool:
    """Return whether byte offsets (n,) name neighbouring elements of ``size`` bytes in ascending order."""
    n = len(offsets)
    return n == 1 or (n > 1 and alignment_and_stride(offsets)[1] == size)


class Shadow:
    """Arrays that describe the bytes of a region, one entry per grain.

    The grain is the smallest access so far, so that a region of floats has one entry per float.

    Args:
        size: Bytes of the region.
        arrays: Element type of each array; entries start as zero.
    """

    def __init__(self, size: int, arrays: dict[str, Any]) -> None:
        self.size, self.grain = size, 8
        # The pages of zeros() take memory only once they are written.
        self.arrays: dict[str, Array] = {k: np.zeros(size // 8 + 1, t) for k, t in arrays.items()}
        self._lanes = np.zeros(0, np.int32)

    def at(self, offsets: Array, size: int) -> Array | slice:
        """Return the entries of an access, after refining the grain to its size if necessary.

        Args:
            offsets: Byte offsets of the elements: (n,).
            size: Bytes of one element, a power of two.

        Returns:
            Indices into the arrays: (n,), or (n, k) for elements of k grains. Neighbouring elements in order give a
            slice instead, which is much faster to read and write.
        """
        grain = min(self.grain, size)
        if grain > 1 and len(offsets) and alignment_and_stride(offsets)[0] & (grain - 1):
            grain = 1
        if grain < self.grain:
            for k, v in self.arrays.items():
                fresh = not v.any()
                n = self.size // grain + 1
                self.arrays[k] = np.zeros(n, v.dtype) if fresh else np.repeat(v, self.grain // grain)[:n]
            self.grain = grain
        shift = grain.bit_length() - 1
        if size <= grain and in_order(offsets, grain):
            first = int(offsets[0]) >> shift
            return slice(first, first + len(offsets))
        index = offsets >> shift
        return index if size <= grain else index[:, None] + np.arange(size // grain)


    def shared(self, at: Array | slice) -> bool:
        """Return whether two lanes of an access have an entry in common; ``at`` are its entries."""
        if isinstance(at, slice) or len(at) < 2:
            return False
        if len(self._lanes) < len(at):
            self._lanes = np.arange(len(at), dtype=np.int32)
        if "lane" not in self.arrays:
            self.arrays["lane"] = np.zeros(self.size // self.grain + 1, np.int32)
        lanes = like(self._lanes[: len(at)], at)
        # The last of several lanes stays.
        self.arrays["lane"][at] = lanes
        return any_nonzero(np.take(self.arrays["lane"], at) != lanes)


def like(v: Array, at: Array | slice) -> Array:
    """Reshape an array over lanes so that it broadcasts with the shadow entries ``at`` of an access."""
    return v if isinstance(at, slice) or at.ndim == 1 else v[:, None]


def entries(array: Array, at: Array | slice) -> Array:
    """Return the shadow entries of an access: (lanes,) or (lanes, grains)."""
    return array[at] if isinstance(at, slice) else np.take(array, at)


def clashes(array: Array, at: Array | slice, wrote: Array) -> Array | None:
    """Return which entries were overwritten by another lane of the access that wrote them, ``None`` for none."""
    if isinstance(at, slice):
        return None
    lost = np.asarray(entries(array, at) != wrote)
    return lost if any_nonzero(lost) else None


def record(shadow: Array, at: Array | slice, programs: Array) -> None:
    """Record which program accessed the entries ``at`` of a shadow array; several programs become -1."""
    before = entries(shadow, at)
    new = np.where((before == 0) | (before == programs), programs, np.int32(-1)) if any_nonzero(before) else programs
    shadow[at] = new
    lost = clashes(shadow, at, new)
    if lost is not None:
        shadow[at[lost]] = -1  # type: ignore[index]


def _words(mask: Array, offsets: Array, size: int) -> tuple[Array, Array | slice] | None:
    """View a byte mask as one word per element.

    Args:
        mask: The mask: bool, (bytes,).
        offsets: Byte offsets of the elements: (n,).
        size: Bytes of one element, a power of two.

    Returns:
        The view and the indices of the elements in it, ``None`` if they are not aligned.
    """
    # Memory of its own is aligned to 16 bytes; asking for an address takes as long as a small access.
    if not mask.flags.c_contiguous or (mask.base is not None and mask.ctypes.data % size):
        return None
    if size > 1 and len(offsets) and alignment_and_stride(offsets)[0] & (size - 1):
        return None
    view = mask[: mask.size // size * size].view(f"u{size}")
    if in_order(offsets, size):
        first = int(offsets[0]) // size
        return view, slice(first, first + len(offsets))
    return view, offsets >> (size.bit_length() - 1)


_ALL_SET: dict[int, Any] = {n: np.dtype(f"u{n}").type(int.from_bytes(b"\1" * n, "little")) for n in (1, 2, 4, 8)}
"""By the bytes of an element: the word of a byte mask in which all of them are set."""


def written(mask: Array, offsets: Array, size: int) -> Array:
    """Return whether all bytes of each element are set in a byte mask.

    Args:
        mask: The mask: bool, (bytes,).
        offsets: Byte offsets of the elements: (n,).
        size: Bytes of one element, a power of two.

    Returns:
        bool, (n,).
    """
    words = _words(mask, offsets, size)
    if words is None:
        return np.asarray(mask[offsets[:, None] + np.arange(size)].all(axis=1))
    view, index = words
    return np.asarray(view[index] == _ALL_SET[size])


def mark(mask: Array, offsets: Array, size: int) -> None:
    """Set the bytes of elements in a byte mask.

    Args:
        mask: The mask: bool, (bytes,).
        offsets: Byte offsets of the elements: (n,).
        size: Bytes of one element, a power of two.
    """
    words = _words(mask, offsets, size)
    if words is None:
        mask[offsets[:, None] + np.arange(size)] = True
    else:
        view, index = words
        view[index] = _ALL_SET[size]


def bits(values: Array, size: int) -> Array:
    """View elements of ``size`` bytes as unsigned integers, which are equal exactly if the bytes are the same."""
    return np.ascontiguousarray(values).view(f"u{size}")
