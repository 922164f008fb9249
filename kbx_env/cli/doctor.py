"""Checks what this machine can grade, and what is missing."""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path
from typing import Any

from kbx_env.bytecode import compiled
from kbx_env.versions import MODIFIED, task_set


def examine() -> list[dict[str, Any]]:
    """Return one row for each check: ``name``, ``ok``, ``found`` and, where ``ok`` is false, the ``remedy``."""
    rows: list[dict[str, Any]] = []

    def add(name: str, ok: bool, found: str, remedy: str = "") -> None:
        rows.append({"name": name, "ok": ok, "found": found, "remedy": "" if ok else remedy})

    add("python", sys.version_info >= (3, 11), platform.python_version(), "use Python 3.11 or newer")
    tasks = task_set()
    add("task set", MODIFIED not in str(tasks.version), f"{tasks.version}, hash {tasks.digest}",
        "the tasks are not those of this version: their results compare with no published ones (docs/task_set.md)")
    add("system", platform.system() == "Linux", f"{platform.system()} {platform.machine()}", "grading needs Linux")
    try:
        import torch

        add("torch", True, torch.__version__)
        add("compiled modules", compiled(), "beside torch's sources" if compiled() else "none beside torch's sources",
            "python -m compileall -q $(python -c 'import torch; print(torch.__path__[0])'): imports take a second instead of "
            "five; workers keep their own in the folder for temporary files")  # fmt: skip
        cuda = torch.cuda.is_available()
        device = torch.cuda.get_device_name(0) if cuda else "no CUDA device"
        add("cuda backend (timing)", cuda, device, "the CPU backend grades correctness without a GPU: --backend cpu")
    except ImportError as e:
        add("torch", False, str(e), "pip install 'torch>=2.11,<2.14'")
    try:
        import triton

        add("triton", True, triton.__version__)
        root = Path(triton.__file__).parent / "backends"
        tools = {"ptxas": root / "nvidia/bin/ptxas"}
        for name, path in tools.items():
            add(name, path.is_file(), "in triton" if path.is_file() else "missing", "reinstall triton")
        add("AMD target", (root / "amd").is_dir(), "gfx942", "this triton has no AMD backend: leave gfx942 out")
    except ImportError as e:
        add("triton", False, str(e), "pip install 'triton>=3.6,<3.8'")
    add(
        "cpu backend",
        all(r["ok"] for r in rows if r["name"] in ("system", "torch", "triton")),
        "executes compiled TTIR",
    )
    from kbx_env.confinement import landlock_version

    version = landlock_version()
    add("confinement", version >= 6, f"Landlock {version}" if version else "no Landlock",
        "Linux 6.12 or newer with Landlock confines submissions fully; older kernels leave more to the audit hook")  # fmt: skip
    pages = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    add("memory", pages >= 4, f"{pages:.0f} GiB", "at least 4 GiB")
    add("cores", True, str(os.cpu_count()))
    return rows
