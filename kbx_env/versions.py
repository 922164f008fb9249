"""Identifies the environment of a verdict: task set, device, libraries, and the grader's own code."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import platform
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

TASK_SET = "22-1"
"""Version of the task set, ``N-X``: results are not comparable across N; X counts the other changes (docs/task_set.md)."""
TASK_SET_HASH = "53dcdd753eb105387009b6af1d2e9d386134f173be0a1ca1d25773c753ab3f6a"
"""``spec.catalog.task_set_hash`` of that version. A test compares it with the tasks and says what to do where they differ."""
MODIFIED = "+modified"
"""Follows the version where the installed tasks are not those of the version."""

_DECIDES = ("grading", "sandbox", "backends", "device", "protocol", "spec", "envs/answer.py", "outcome.py", "confinement.py")
"""Folders and files of the package whose code decides verdicts."""
_LIBRARIES = ("numpy", "scipy", "ml_dtypes")


@dataclass(frozen=True)
class TaskSet:
    """Identifies the tasks of a result. Both are ``None`` where no task is the benchmark's own.

    Attributes:
        version: ``N-X``, with ``MODIFIED`` after it where the installed tasks are not those of the version.
        digest: one hash over all tasks of the benchmark (SHA-256, hexadecimal).
    """

    version: str | None
    digest: str | None

    def entries(self) -> dict[str, str | None]:
        """Return the entries of a manifest: ``task_set`` and ``task_set_hash``."""
        return {"task_set": self.version, "task_set_hash": self.digest}

    def __str__(self) -> str:
        """Return version and the first 12 digits of the hash, for people."""
        return "tasks of packs only" if self.version is None else f"{self.version} ({str(self.digest)[:12]})"


def task_set(task_ids: Iterable[str] | None = None) -> TaskSet:
    """Identify the benchmark's tasks.

    Args:
        task_ids: the tasks of a result; ``None`` for the benchmark itself.

    Returns:
        Version and hash of the whole benchmark, also where only some of its tasks were graded.
    """
    from kbx_env.spec import catalog, packs

    if task_ids is not None and all(packs.split_id(t)[0] is not None for t in task_ids):
        return TaskSet(None, None)
    digest = catalog.task_set_hash()
    return TaskSet(TASK_SET if digest == TASK_SET_HASH else TASK_SET + MODIFIED, digest)


def environment(backend: str) -> dict[str, str]:
    """Describe the environment of a grading, for the key under which it is stored.

    Args:
        backend: ``cpu`` or ``cuda``, resolved.

    Returns:
        Device, versions of Python and libraries, machine, and the digest of the grader's code.
    """
    import torch
    import triton

    import kbx_env

    return {
        "device": torch.cuda.get_device_name(0) if backend == "cuda" else "cpu",
        "torch": torch.__version__, "triton": triton.__version__, "kbx_env": kbx_env.__version__,
        "python": platform.python_version(), "machine": platform.machine(), "grader": code_digest(),
        **{name: importlib.metadata.version(name) for name in _LIBRARIES},
    }  # fmt: skip


@functools.cache
def code_digest(root: Path = Path(__file__).resolve().parent) -> str:
    """Compute a digest of the code and data that decide verdicts, which in a clone change without a new version.

    Args:
        root: the folder of the package.

    Returns:
        SHA-256 in hexadecimal.
    """
    digest = hashlib.sha256()
    for name in _DECIDES:
        files = [root / name] if name.endswith(".py") else (root / name).rglob("*")
        for file in sorted(f for f in files if f.suffix in (".py", ".json")):
            text = file.read_bytes()
            digest.update(f"{file.relative_to(root).as_posix()} {len(text)}\0".encode() + text)
    return digest.hexdigest()
