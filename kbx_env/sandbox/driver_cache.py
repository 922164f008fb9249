"""What gcc builds for every runner, Triton's driver and the launcher: the first runner of a zygote keeps a copy for the others."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable


def kept(cache: str, shared: str, build: Callable[[], object]) -> None:
    """Fill a runner's cache before it loads a submission, so that nothing of a submission can be in the copy.

    A confined process cannot write to the shared folder.

    Args:
        cache: folder of Triton's cache of this runner; it must not exist yet.
        shared: folder of the copy; it exists once a runner has built everything.
        build: loads what is built, and builds it if the cache has none.
    """
    with contextlib.suppress(OSError):  # the first runner finds none
        shutil.copytree(shared, cache)
    build()
    if not os.path.isdir(shared) and os.path.isdir(cache):
        part = f"{shared}-{os.getpid()}"
        with contextlib.suppress(OSError):  # another runner was first, or the disk is full
            shutil.copytree(cache, part)
            os.rename(part, shared)
        shutil.rmtree(part, ignore_errors=True)
