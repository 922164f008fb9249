"""Checks what this machine can grade, and what is missing."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from kbx_env.bytecode import compiled
from kbx_env.versions import MODIFIED, task_set

_PROBE = """
import ctypes, json, os, sys
from kbx_env.confinement import confine, landlock_version
pid = os.fork()
if pid == 0:
    unshare = ctypes.CDLL(None).unshare
    os._exit(0 if unshare(0x20000000) == 0 or unshare(0x10000000 | 0x20000000) == 0 else 1)
apart = os.waitpid(pid, 0)[1] == 0
print(json.dumps({"landlock": landlock_version(), "processes": apart, **confine(sys.argv[1])._asdict()}))
"""
"""Confines itself as a runner does, and says what is in force. The numbers are CLONE_NEWPID and CLONE_NEWUSER of unshare."""
_PARTS = {"files": "files", "signals": "signals", "tcp": "TCP", "capabilities": "privileges"}
"""What every submission must be kept from, by the fields of ``Confined``."""


def _confinement() -> list[tuple[str, bool, str, str]]:
    """Try in a process of its own what the system lets a sandbox do.

    Returns:
        Name, whether it is there, what was found, and the remedy of each part. The last two are second lines of defence.
    """
    with tempfile.TemporaryDirectory(prefix="kbx-doctor-") as folder:
        done = subprocess.run([sys.executable, "-c", _PROBE, folder], capture_output=True, text=True, timeout=60)
    try:
        got: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        return [("confinement", False, (done.stderr.strip().splitlines() or ["no answer"])[-1], "submissions cannot be confined")]
    missing = [name for key, name in _PARTS.items() if not got[key]]
    found = (f"Landlock {got['landlock']}" if got["landlock"] else "no Landlock") + f"; open: {', '.join(missing) or 'nothing'}"
    root = os.getuid() == 0
    return [
        ("confinement", not missing, found,
         "Linux 6.12 or newer with Landlock confines submissions fully (in Docker, a seccomp profile that allows landlock_*); "
         "older kernels leave more to the audit hook"),
        ("network namespace", got["network"], "yes" if got["network"] else "no: Landlock refuses TCP, UDP is open",
         "in a container: docker run --network none, or a network without a way out"),
        ("process namespace", got["processes"], "yes" if got["processes"] else "no" + ", and this is root" * root,
         "in a container: docker run --pids-limit 1024, as a user other than root"),
    ]  # fmt: skip


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
    for name, ok, found, remedy in _confinement():
        add(name, ok, found, remedy)
    pages = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    add("memory", pages >= 4, f"{pages:.0f} GiB", "at least 4 GiB")
    add("cores", True, str(os.cpu_count()))
    return rows
