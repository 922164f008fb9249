"""Triton's cache of a runner, whose folder only one process uses."""

from __future__ import annotations

import os
import threading
from typing import Any

import triton
from triton.runtime.cache import FileCacheManager


class RunnerCache(FileCacheManager):
    """Writes each of a kernel's eight files in fewer steps than Triton, which makes and removes a folder for each.

    While one thread does this in Python, the others that compile wait for Python's lock. A file still appears at once and whole:
    two threads may build the same launcher, and one has loaded it when the other is done.
    """

    def put(self, data: Any, filename: str, binary: bool = True) -> str:
        """Write a file.

        Args:
            data: bytes, or an object whose ``str`` is the text.
            filename: without its folder.
            binary: not used, as in Triton.

        Returns:
            The path.
        """
        path = os.path.join(self.cache_dir, filename)
        part = f"{path}.{threading.get_native_id()}"
        raw = data if isinstance(data, bytes) else str(data).encode()
        file = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        try:
            left = memoryview(raw)
            while left:
                left = left[os.write(file, left) :]
        finally:
            os.close(file)
        os.replace(part, path)
        return path


def install() -> None:
    """Have Triton use this cache in this process."""
    triton.knobs.cache.manager_class = RunnerCache
