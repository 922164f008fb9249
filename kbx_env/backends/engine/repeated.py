"""Gigabytes of repeated values that take the memory of one period: its pages are mapped again and again."""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import weakref

import numpy as np

PERIOD = 16 << 20
"""Bytes of a period at least: fewer, larger maps."""
LARGE = 128 << 20
"""Where whole tiles fill whole pages only after more than this, values are written out."""
_FIXED = 0x10  # MAP_FIXED, which mmap does not name


def repeated(tile: bytes | bytearray | memoryview, size: int) -> np.ndarray:
    """``size`` bytes (uint8, writable) that repeat ``tile``, which is not empty; a page is copied when somebody writes to it."""
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
        # Not at exit: somebody may still look at it, and then all goes anyway.
        weakref.finalize(buffer, libc.munmap, base, span).atexit = False
        for at in range(0, span, period):
            mapped(base + at, min(period, span - at), mmap.PROT_READ | mmap.PROT_WRITE, _FIXED, fd)
    finally:
        os.close(fd)
    return np.ctypeslib.as_array(buffer)
