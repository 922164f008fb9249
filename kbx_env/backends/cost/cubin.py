"""Read the resources of a kernel from its cubin: registers and local memory per thread."""

from __future__ import annotations

import struct
from dataclasses import dataclass

_REGCOUNT, _FRAME_SIZE = 0x2F, 0x11
"""Attributes of the section ``.nv.info``: registers per thread, bytes of stack frame per thread."""
_SIZED = 4
"""Format of an attribute that is followed by a two-byte length and its value."""


@dataclass(frozen=True)
class Resources:
    """Resources of one thread of a kernel.

    Attributes:
        registers: 32-bit registers per thread.
        local_bytes: Bytes of local memory per thread: spilled registers and arrays.
    """

    registers: int
    local_bytes: int


def resources(cubin: bytes) -> Resources:
    """Read the resources of the only kernel of a cubin.

    Args:
        cubin: The file's bytes: a 64-bit ELF, little endian.

    Returns:
        The resources.

    Raises:
        ValueError: the bytes are no 64-bit ELF, or contain no register count.
    """
    if cubin[:5] != b"\x7fELF\x02":
        raise ValueError("a cubin is a 64-bit ELF")
    (table,) = struct.unpack_from("<Q", cubin, 0x28)
    width, count, names_at = struct.unpack_from("<HHH", cubin, 0x3A)
    headers = [struct.unpack_from("<IIQQQQIIQQ", cubin, table + k * width) for k in range(count)]
    names = headers[names_at][4]
    found: dict[int, int] = {}
    for h in headers:
        name = cubin[names + h[0] : cubin.index(b"\0", names + h[0])]
        if name != b".nv.info":
            continue
        at, end = h[4], h[4] + h[5]
        while at + 4 <= end:
            form, attribute, size = struct.unpack_from("<BBH", cubin, at)
            at += 4
            if form == _SIZED:
                if attribute in (_REGCOUNT, _FRAME_SIZE) and size == 8:
                    # The symbol and the value. Helper functions have entries of their own, with smaller values.
                    found[attribute] = max(found.get(attribute, 0), struct.unpack_from("<II", cubin, at)[1])
                at += size
    if _REGCOUNT not in found:
        raise ValueError("the cubin names no register count")
    return Resources(found[_REGCOUNT], found.get(_FRAME_SIZE, 0))
