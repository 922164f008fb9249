"""Confines a process by means of Linux, whatever Python code it runs: Landlock, no capabilities, no network.

Landlock (Linux 5.13; signals and abstract sockets from 6.12) needs no privileges and no namespaces. A confined process
may write only below its private folder and to GPU devices. It may not trace a process outside its domain (such as the
grader), read its memory, or send it signals. The packages on PyPI implement the file rules only, so the three system
calls are made here.

The constants are those of linux/landlock.h, linux/capability.h, linux/prctl.h and linux/sched.h.
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
"""Numbers of the system calls landlock_create_ruleset, landlock_add_rule and landlock_restrict_self."""
_FILE = {"write": 1 << 1, "truncate": 1 << 14}
_MAKE = sum(1 << n for n in (4, 5, 6, 7, 8, 9, 10, 11, 12))
"""Rights to remove directories and files, and to make devices, directories, files, sockets, fifos and links."""
_READ = 1 << 2
_REFER = 1 << 13
"""Right to link or rename files between folders."""
_TCP, _SCOPES = 0b11, 0b11
"""TCP rights: bind and connect. Scopes: abstract sockets and signals."""
_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom", "/dev/nvidia*", "/dev/nvidia-caps/*",
            "/dev/dri/*", "/dev/kfd", "/dev/dxg")  # fmt: skip
HIDDEN = "compiled"
"""Name of a folder in the lock folder of a GPU that submissions may not read: it holds compiled baselines."""
_NEWNET = 0x40000000
"""CLONE_NEWNET of unshare."""
_NO_NEW_PRIVILEGES = 38
"""PR_SET_NO_NEW_PRIVS."""
_CAPABILITY_V3 = 0x20080522
"""_LINUX_CAPABILITY_VERSION_3."""


class Confined(NamedTuple):
    """The restrictions that are in force; each one works without the others.

    Attributes:
        files: no writing outside the folder, no tracing of other processes.
        signals: no signals and no abstract sockets to other processes.
        tcp: no TCP connections and servers.
        network: an own network namespace, in which nothing can be reached.
        capabilities: all capabilities are dropped.
    """

    files: bool
    signals: bool
    tcp: bool
    network: bool
    capabilities: bool


def landlock_version() -> int:
    """Return the version of Landlock's interface in this Linux kernel; 0 without Landlock."""
    if platform.system() != "Linux":
        return 0
    return max(0, int(_libc().syscall(_CREATE, None, ctypes.c_size_t(0), ctypes.c_uint(1))))


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def around(path: str, hidden: str) -> Iterator[str]:
    """Split a path so that a hidden path is left out: Landlock can only grant access, so all other parts are granted.

    Args:
        path: a file or folder.
        hidden: the path to leave out.

    Yields:
        The path itself if it does not contain ``hidden``, else the entries around ``hidden``, as deep as necessary.
    """
    path = os.path.realpath(path)
    if not (hidden + os.sep).startswith(path.rstrip(os.sep) + os.sep):
        yield path
    elif path != hidden:
        for entry in os.scandir(path):
            # A right counts for the target of a link; the target is granted by itself or not at all.
            if not entry.is_symlink():
                yield from around(entry.path, hidden)


def unhidden(temporary: str) -> list[str] | None:
    """Return the paths that a runner may read: all except the lock folders of GPUs.

    The restriction applies once a lock folder has a folder ``HIDDEN``, which contains the code that torch's compiler
    made for a task's baseline. Paths that appear later are not granted.

    Args:
        temporary: the grader's folder of temporary files, in which the lock folders are.

    Returns:
        The paths, or ``None`` if everything may be read.
    """
    stem = os.path.join(os.path.realpath(temporary), f"kbx-gpu-{os.getuid()}-")
    lock_folders = glob.glob(glob.escape(stem) + "?*")
    if not any(os.path.exists(os.path.join(folder, HIDDEN)) for folder in lock_folders):
        return None
    readable = [os.sep]
    for hidden in [stem, *lock_folders]:
        readable = [part for path in readable for part in around(path, hidden)]
    return readable


def confine(folder: str, readable: Iterable[str] | None = None) -> Confined:
    """Confine this thread, and all threads and processes that it starts from now on. This cannot be undone.

    Args:
        folder: the only folder below which it may write.
        readable: files and folders that it may read besides; by default everything. Folders can always be listed.

    Returns:
        The restrictions that are in force.
    """
    libc = _libc()
    # unshare needs privileges. Without them Landlock refuses TCP; UDP stays open, but finds no service to talk to.
    network = libc.unshare(_NEWNET) == 0
    libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    version = landlock_version()
    files = version > 0 and _restrict(libc, version, folder, readable)
    header, nothing = struct.pack("Ii", _CAPABILITY_V3, 0), bytes(24)
    dropped = libc.capset(header, nothing) == 0
    return Confined(files, files and version >= 6, files and version >= 4, network, dropped)


def close_files(files: Iterable[str]) -> bool:
    """Take from this thread, and from all that it starts from now on, the right to open files for writing. This cannot be undone.

    The driver opens the device files of GPUs for writing, and takes a GPU whose file it cannot open for absent. All other files
    can be written as before, but new ones that appear beside a closed file cannot.

    Args:
        files: to be closed; those that are open stay open.

    Returns:
        Whether they are closed: not without version 2 of Landlock. The first one refuses to move any file to another folder.
    """
    libc = _libc()
    if landlock_version() < 2:
        return False
    allowed = [os.sep]
    for hidden in files:
        allowed = [part for path in allowed for part in around(path, os.path.realpath(hidden))]
    libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    file, folder = _FILE["write"], _FILE["write"] | _REFER
    rules = [(path, folder if os.path.isdir(path) else file) for path in allowed]
    return _apply(libc, struct.pack("Q", folder), rules, optional={file, folder})


def _restrict(libc: ctypes.CDLL, version: int, folder: str, readable: Iterable[str] | None) -> bool:
    read = 0 if readable is None else _READ
    file = _FILE["write"] | (_FILE["truncate"] if version >= 3 else 0) | read
    handled = file | _MAKE | (_REFER if version >= 2 else 0)
    size = 24 if version >= 6 else 16 if version >= 4 else 8
    attributes = struct.pack("QQQ", handled, _TCP, _SCOPES)[:size]
    allowed = [(folder, handled)] + [(d, file) for pattern in _DEVICES for d in glob.glob(pattern)]
    return _apply(libc, attributes, allowed + [(path, read) for path in readable or ()], optional={read})


def _apply(
    libc: ctypes.CDLL, attributes: bytes, allowed: Iterable[tuple[str, int]], *, optional: set[int]
) -> bool:  # fmt: skip
    """Restrict this thread by a set of rules.

    Args:
        libc: the C library.
        attributes: what the rules handle, as Linux wants it.
        allowed: paths, and the rights that are granted for each.
        optional: of these rights, those that need not be granted: their file has been deleted, or its mount is broken.

    Returns:
        Whether the rules are in force.
    """
    rules = int(libc.syscall(_CREATE, attributes, ctypes.c_size_t(len(attributes)), ctypes.c_uint(0)))
    if rules < 0:
        return False
    try:
        for path, access in allowed:
            try:
                descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
            except OSError:
                if access not in optional:
                    raise
                continue  # what is not granted cannot be used
            try:
                rule = struct.pack("=Qi", access, descriptor)
                if libc.syscall(_ADD, rules, 1, rule, ctypes.c_uint(0)) != 0 and access not in optional:
                    return False
            finally:
                os.close(descriptor)
        return int(libc.syscall(_RESTRICT, rules, ctypes.c_uint(0))) == 0
    finally:
        os.close(rules)
