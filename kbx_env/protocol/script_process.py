"""What the grader and the process of a policy's script agree on: how it starts, where its files are, how they are removed."""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets

BOOT = """
import sys
kbx_env = type(sys)("kbx_env")
kbx_env.__path__ = [sys.argv[1]]
sys.modules["kbx_env"] = kbx_env
from kbx_env.sandbox.script import main
exec(compile(*main()))
"""
"""Python code of the child. It does not import the package itself, which would take longer than the script's set-up."""
FILES = "files"
"""Subfolder with the script's files; its home and its caches are beside it."""


def remove(folder: str) -> None:
    """Remove a folder that no process uses any more, however deep it is and whatever its permissions.

    ``shutil.rmtree`` is recursive and fails on a thousand nested folders; here inner folders are moved up one by one.
    """
    token, count, again = secrets.token_hex(8), itertools.count(), True
    with contextlib.suppress(OSError):
        while again:
            again = False
            with os.scandir(folder) as found:
                entries = list(found)
            for entry in entries:
                if not entry.is_dir(follow_symlinks=False):
                    os.unlink(entry.path)
                    continue
                again = True
                os.chmod(entry.path, 0o700)
                with os.scandir(entry.path) as found:
                    inner = list(found)
                for one in inner:
                    if one.is_dir(follow_symlinks=False):
                        os.chmod(one.path, 0o700)
                        os.rename(one.path, os.path.join(folder, f"{token}{next(count)}"))
                    else:
                        os.unlink(one.path)
                os.rmdir(entry.path)
        os.rmdir(folder)
