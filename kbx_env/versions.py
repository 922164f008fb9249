"""Identifies the environment of a verdict: device, libraries, and the grader's own code."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import platform
from pathlib import Path

_DECIDES = ("grading", "sandbox", "backends", "device", "protocol", "spec", "envs/answer.py", "outcome.py", "confinement.py")
"""Folders and files of the package whose code decides verdicts."""
_LIBRARIES = ("numpy", "scipy", "ml_dtypes")


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
