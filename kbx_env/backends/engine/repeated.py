"""Large arrays of repeated values that take the memory of one period: its pages are mapped repeatedly."""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import weakref

import numpy as np

PERIOD = 16 << 20
"""Smallest size of a period in bytes: larger periods need fewer maps."""
LARGE = 128 << 20
"""Largest size in bytes of whole tiles that fill whole pages; if more are needed, the array is written out."""
_FIXED = 0x10  # MAP_FIXED, which mmap does not name


def repeated(tile: bytes | bytearray | memoryview, size: int) -> np.ndarray:
    """Return an array that repeats some bytes.

    Args:
        tile: The bytes, at least one.
        size: Size of the array in bytes.

    Returns:
        uint8, (size,), writable; a page is copied when it is written.

    Raises:
        MemoryError: the pages cannot be mapped.
    """
    n, page = len(tile), mmap.PAGESIZE
    period = n * (page // math.gcd(n, page))
    period *= -(-PERIOD // period)
    if size < 2 * period or period > LARGE or not hasattr(os, "memfd_create"):
        return np.resize(np.frombuffer(tile, np.uint8), size)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    span = -(-size // page) * page

    def mapped(at: int | None, length: int, access: int, flags: int, fd: int) -> int:
        """Map private pages of a file with ``mmap`` and return their address."""
        found = libc.mmap(at, length, access, mmap.MAP_PRIVATE | flags, fd, 0)
        if found in (None, ctypes.c_void_p(-1).value):
            raise MemoryError(os.strerror(ctypes.get_errno()))
        return int(found)

    fd = os.memfd_create("repeated", os.MFD_CLOEXEC)
    try:
        with os.fdopen(os.dup(fd), "wb") as file:
            block, times = max(1, (1 << 20) // n), period // n
            for _ in range(times // block):
                file.write(bytes(tile) * block)
            file.write(bytes(tile) * (times % block))
        base = mapped(None, span, 0, mmap.MAP_ANONYMOUS, -1)
        buffer = (ctypes.c_uint8 * size).from_address(base)
        # Not at exit, when other objects may still use the array; the process frees the pages anyway.
        weakref.finalize(buffer, libc.munmap, base, span).atexit = False
        for at in range(0, span, period):
            mapped(base + at, min(period, span - at), mmap.PROT_READ | mmap.PROT_WRITE, _FIXED, fd)
    finally:
        os.close(fd)
    return np.ctypeslib.as_array(buffer)
