"""Keeps compiled Python modules for processes that the grader starts, where the installation has none.

Images often set ``PYTHONDONTWRITEBYTECODE``, and some installers do not compile. Then every process compiles all of torch
when it imports it: 8 s of a core instead of 1 (torch 2.11, Python 3.12), twice for each worker.
"""

from __future__ import annotations

import importlib.util
import os
import stat
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

NO_BYTECODE, PREFIX = "PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX"
"""Environment variables of Python: write no bytecode, and the folder for bytecode instead of ``__pycache__``."""


def compiled(package: str = "torch") -> bool:
    """Return whether an installed package has bytecode for this interpreter beside its source.

    Args:
        package: its name; it is not imported.

    Returns:
        True also where the package is missing or has no source file.
    """
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return True
    source = Path(spec.origin)
    return (source.parent / "__pycache__" / f"{source.stem}.{sys.implementation.cache_tag}.pyc").exists()


def with_bytecode(env: Mapping[str, str]) -> dict[str, str]:
    """Return an environment for a new Python process that finds and keeps compiled modules.

    Args:
        env: the environment so far. A folder for bytecode that it names stays.

    Returns:
        The same where torch is compiled; otherwise one with a folder of this user, which all processes share.
    """
    env = dict(env)
    if env.get(PREFIX) or compiled():
        return env
    folder = Path(tempfile.gettempdir()) / f"kbx-bytecode-{os.getuid()}-{sys.implementation.cache_tag}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError:
        return env
    # Whoever can write here decides what the grader executes: only this user may.
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        return env
    env.pop(NO_BYTECODE, None)
    env[PREFIX] = str(folder)
    return env
