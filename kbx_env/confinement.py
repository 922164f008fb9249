"""What the kernel holds a runner to, whatever Python code it runs: Landlock, no capabilities, no network.

Landlock (Linux 5.13; signals and abstract sockets from 6.12) needs no privileges and no namespaces: the runner may write below
its private folder and to GPU devices, may not trace or read the memory of a process outside of its domain (the grader), and
may not signal one. The packages on PyPI know the file rules only, so the three system calls are made here.
"""

from __future__ import annotations

import ctypes
import glob
import os
import platform
import struct
from collections.abc import Iterable, Iterator
from typing import NamedTuple

_CREATE, _ADD, _RESTRICT = 444, 445, 446
_FILE = {"write": 1 << 1, "truncate": 1 << 14}
_MAKE = sum(1 << n for n in (4, 5, 6, 7, 8, 9, 10, 11, 12))
"""Remove directories and files; make devices, directories, files, sockets, fifos, block devices and links."""
_READ = 1 << 2
_REFER = 1 << 13
_TCP, _SCOPES = 0b11, 0b11
"""Bind and connect; abstract sockets and signals."""
_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom", "/dev/nvidia*", "/dev/nvidia-caps/*",
            "/dev/dri/*", "/dev/kfd", "/dev/dxg")  # fmt: skip
HIDDEN = "compiled"
"""In the folder of a GPU's lease: what submissions may not read."""
_NEWNET = 0x40000000
_NO_NEW_PRIVILEGES = 38
_CAPABILITY_V3 = 0x20080522


class Confined(NamedTuple):
    """What was put in place; each is worth something without the others."""

    files: bool
    """Writing outside of the folder, and tracing other processes."""
    signals: bool
    tcp: bool
    network: bool
    """A network namespace of its own: there is nothing to connect to."""
    capabilities: bool


def landlock_version() -> int:
    """The kernel's version of the interface, 0 without Landlock."""
    if platform.system() != "Linux":
        return 0
    return max(0, int(_libc().syscall(_CREATE, None, ctypes.c_size_t(0), ctypes.c_uint(1))))


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def around(path: str, hidden: str) -> Iterator[str]:
    """A path; or what is in it, as deep as it takes to leave ``hidden`` out, because Landlock grants and never denies."""
    path = os.path.realpath(path)
    if not (hidden + os.sep).startswith(path.rstrip(os.sep) + os.sep):
        yield path
    elif path != hidden:
        for entry in os.scandir(path):
            # A link is granted by whoever grants what it leads to.
            if not entry.is_symlink():
                yield from around(entry.path, hidden)


def unhidden(temporary: str) -> list[str] | None:
    """What a runner may read, ``None`` for everything: all but the leases of GPUs below the grader's ``temporary`` folder, once
    one of them has a folder ``HIDDEN``, which holds what torch's compiler made of a task. What appears there later is not
    granted either."""
    stem = os.path.join(os.path.realpath(temporary), f"kbx-gpu-{os.getuid()}-")
    leases = glob.glob(glob.escape(stem) + "?*")
    if not any(os.path.exists(os.path.join(lease, HIDDEN)) for lease in leases):
        return None
    found = [os.sep]
    for hidden in [stem, *leases]:
        found = [p for place in found for p in around(place, hidden)]
    return found


def confine(folder: str, readable: Iterable[str] | None = None) -> Confined:
    """Confine this thread and all threads and processes that it starts from now on; cannot be undone.

    Args:
        folder: may be written below.
        readable: what may be read besides, files and folders; by default everything. Names can be listed in any case.
    """
    libc = _libc()
    # Only with privileges of some kind; without them Landlock refuses TCP, and there is nobody to talk to by UDP.
    network = libc.unshare(_NEWNET) == 0
    libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    version = landlock_version()
    files = version > 0 and _restrict(libc, version, folder, readable)
    header, nothing = struct.pack("Ii", _CAPABILITY_V3, 0), bytes(24)
    dropped = libc.capset(header, nothing) == 0
    return Confined(files, files and version >= 6, files and version >= 4, network, dropped)


def _restrict(libc: ctypes.CDLL, version: int, folder: str, readable: Iterable[str] | None) -> bool:
    read = 0 if readable is None else _READ
    file = _FILE["write"] | (_FILE["truncate"] if version >= 3 else 0) | read
    handled = file | _MAKE | (_REFER if version >= 2 else 0)
    size = 24 if version >= 6 else 16 if version >= 4 else 8
    attributes = struct.pack("QQQ", handled, _TCP, _SCOPES)[:size]
    rules = int(libc.syscall(_CREATE, attributes, ctypes.c_size_t(size), ctypes.c_uint(0)))
    if rules < 0:
        return False
    try:
        allowed = [(folder, handled)] + [(d, file) for pattern in _DEVICES for d in glob.glob(pattern)]
        allowed += [(path, read) for path in readable or ()]
        for path, access in allowed:
            try:
                place = os.open(path, os.O_PATH | os.O_CLOEXEC)
            except OSError:
                if access != read:
                    raise
                continue  # other processes' files come and go, and mounts may be broken: what is not granted is not read
            try:
                rule = struct.pack("=Qi", access, place)
                if libc.syscall(_ADD, rules, 1, rule, ctypes.c_uint(0)) != 0 and access != read:
                    return False
            finally:
                os.close(place)
        return int(libc.syscall(_RESTRICT, rules, ctypes.c_uint(0))) == 0
    finally:
        os.close(rules)
