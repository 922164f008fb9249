"""Triton's cache of a runner, which only one process uses: it keeps the files of kernels in memory.

Triton writes eight files for each kernel and reads seven of them again. MEASURED
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from pathlib import Path, PurePath
from typing import Any

import triton
from triton.compiler import compiler
from triton.runtime.cache import FileCacheManager

KERNEL_FILES = frozenset({".source", ".ttir", ".ttgir", ".llir", ".ptx", ".cubin", ".amdgcn", ".hsaco", ".json"})
"""Endings of the files that stay in memory. Others are written, because they may be libraries, which the loader opens."""

_held: dict[str, bytes] = {}
"""The files in memory by the path that they would have, to the end of the process."""


class RunnerCache(FileCacheManager):
    """Keeps files in memory. It writes others in fewer steps than Triton, which makes and removes a folder for each.

    A file on the disk appears at once and whole: two threads may build the same launcher, and one has loaded it when the other is
    done.
    """

    def __init__(self, key: str, override: bool = False, dump: bool = False) -> None:
        self._on_disk = override or dump  # somebody wants to look at these files
        if self._on_disk:
            super().__init__(key, override, dump)
            return
        # Triton makes the folder now. Here it is made when a file is written.
        self.key, self.cache_dir = key, os.path.join(triton.knobs.cache.dir, key)
        self.lock_path = os.path.join(self.cache_dir, "lock")

    def has_file(self, filename: str) -> bool:
        """Return whether there is a file of this name, in memory or in the folder."""
        return self._make_path(filename) in _held or super().has_file(filename)

    def put(self, data: Any, filename: str, binary: bool = True) -> str:
        """Keep a file.

        Args:
            data: bytes, or an object whose ``str`` is the text.
            filename: without its folder.
            binary: not used, as in Triton.

        Returns:
            The path. There is no file if the content stays in memory.
        """
        path = os.path.join(self.cache_dir, filename)
        raw = data if isinstance(data, bytes) else str(data).encode()
        if not self._on_disk and PurePath(filename).suffix in KERNEL_FILES:
            _held[path] = raw
            return path
        return self._write(path, raw)

    def _write(self, path: str, raw: bytes) -> str:
        """Write a file to the disk, and return its path."""
        if not self._on_disk:
            FileCacheManager(self.key)  # makes the folder
        part = f"{path}.{threading.get_native_id()}"
        file = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        try:
            left = memoryview(raw)
            while left:
                left = left[os.write(file, left) :]
        finally:
            os.close(file)
        os.replace(part, path)
        return path

    def get_file(self, filename: str) -> str | None:
        """Return the path of a file, which is on the disk from then on; ``None`` if there is none.

        Triton's autotuner opens the path.
        """
        path = self._make_path(filename)
        return self._write(path, _held[path]) if path in _held else super().get_file(filename)

    def get_group(self, filename: str) -> dict[str, str] | None:
        """Return the paths of a kernel's files by their names.

        Args:
            filename: of the group.

        Returns:
            The paths, of files in memory, too; ``None`` if there is no such group.
        """
        found = _held.get(self._make_path(f"__grp__{filename}"))
        if found is None:
            return None
        return {name: path for name, path in json.loads(found)["child_paths"].items() if path in _held or os.path.exists(path)}


class _HeldFile:
    """Stands for the path of a file in memory where Triton reads a kernel."""

    def __init__(self, path: str) -> None:
        self._raw, self.suffix = _held[path], PurePath(path).suffix

    def read_bytes(self) -> bytes:
        return self._raw

    def read_text(self) -> str:
        return self._raw.decode()


def _path(path: str) -> Any:
    """Return what reads a file: from memory if it is there, else from the disk."""
    return _HeldFile(path) if path in _held else Path(path)


def write_out(path: str) -> None:
    """Write a file that is in memory to its path; others are left alone."""
    if path in _held:
        RunnerCache(os.path.basename(os.path.dirname(path))).get_file(os.path.basename(path))


def install() -> None:
    """Have Triton use this cache in this process."""
    triton.knobs.cache.manager_class = RunnerCache
    reader: Callable[[str], Any] = _path
    compiler.Path = reader  # type: ignore[misc, assignment]
