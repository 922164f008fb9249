"""What a runner may not do to its host: an audit hook that cannot be removed, and resource limits."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kbx_env.sandbox.firewall import Log  # imports torch, which who only sets limits need not wait for

_TOOLS = {"ptxas", "ptxas-blackwell", "ld.lld", "gcc", "cc", "clang", "ldconfig", "uname", "file"}
_CLOSED = (
    "socket.connect", "socket.bind", "socket.sendto", "os.exec", "os.fork", "os.forkpty", "os.posix_spawn",
    "os.system", "os.kill", "os.killpg", "os.putenv", "os.chmod", "os.chown", "os.link", "os.symlink",
    "sys.addaudithook", "sys.setprofile", "sys.settrace", "pty.spawn", "gc.get_objects", "gc.get_referrers",
    "signal.pthread_kill", "code.__new__", "cpython.run_command",
)  # fmt: skip
_HIDDEN = (
    "kbx_env.tasks", "kbx_env.grading", "kbx_env.rewards", "kbx_env.baselines", "kbx_env.store", "kbx_env.executor", "kbx_env.envs",
    "kbx_env.cli", "kbx_env.eval", "kbx_env.train",
)  # fmt: skip
_FOREIGN = ("numpy.ctypeslib", "cffi", "numba", "cupy", "jax", "tensorflow", "torch.utils.cpp_extension",
            "torch._inductor", "torch._dynamo", "multiprocessing", "scipy")  # fmt: skip


WRITES = 64
"""Files that a submission may open for writing, of at most ``FILE_BYTES`` each: together less than a disk."""
FILE_BYTES = 16 << 20
MEMORY = 6 << 30
"""Bytes that a CPU submission may grow by."""
GPU_MEMORY = 24 << 30
"""The same on CUDA, counted without what the driver reserves."""
DEVICE_MEMORY, DEVICE_SHARE = 48 << 30, 0.8
"""Bytes of a GPU that a submission may have, and the share of a small one: others are at work beside it."""


def limit(device: str) -> None:
    """Set resource limits of this process."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_BYTES, FILE_BYTES))
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NPROC, (4096, 4096))
    # The driver reserves address space by the hundred gigabytes: there the writable private pages are counted.
    kind, field, more = (resource.RLIMIT_DATA, 5, GPU_MEMORY) if device == "cuda" else (resource.RLIMIT_AS, 0, MEMORY)
    with open("/proc/self/statm") as f:
        most = int(f.read().split()[field]) * os.sysconf("SC_PAGE_SIZE") + more
    resource.setrlimit(kind, (most, most))


def start_cuda() -> None:
    """Start the driver and bound this process's share of the GPU.

    Before a process is confined: the driver's first steps reach files that no submission needs to write.
    """
    import torch

    torch.cuda.init()
    torch.zeros(1, device="cuda")
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(min(DEVICE_SHARE, DEVICE_MEMORY / total))
    torch.cuda.device_count()  # asks a library once and keeps the answer


def watch(log: Log, folder: str, armed: Callable[[], bool]) -> None:
    """Install the audit hook. While ``armed()`` is true, forbidden events are logged and refused.

    Args:
        log: receives the attempts.
        folder: the only folder that may be written.
        armed: false while the runner itself works (set up, compile, answer).
    """
    writing = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
    triton_root = os.path.dirname(sys.modules["triton"].__file__ or "") + os.sep
    standard = os.path.dirname(os.__file__) + os.sep
    packages = os.path.dirname(os.path.dirname(triton_root)) + os.sep
    testing = triton_root + "testing.py"

    def from_triton() -> bool:
        # subprocess and importlib call on behalf of the compiler: the nearest frame of anybody else tells who asked. Code
        # that a submission makes under another file's name is refused where it is made ("code.__new__", "compile").
        frame: Any = sys._getframe(2)
        while frame is not None:
            name = frame.f_code.co_filename
            if name.startswith(triton_root):
                return name != testing
            if not name.startswith(("<frozen ", standard, packages)):
                return False
            frame = frame.f_back
        return False

    written = 0

    def tool(executable: Any) -> bool:
        # By full path: a file of this name that a submission has written is no compiler.
        name = str(executable)
        if os.path.basename(name) not in _TOOLS:
            return False
        found = name if os.sep in name else shutil.which(name) or ""
        return not os.path.realpath(found).startswith(folder + os.sep)

    def hook(event: str, args: tuple[Any, ...]) -> None:
        nonlocal written
        if event == "open":
            path, mode, flags = (*args, None, 0)[:3]
            if not (isinstance(flags, int) and flags & writing) and not (
                isinstance(mode, str) and set(mode) & set("wax+")
            ):
                return
            if not armed() or from_triton():
                return
            full = os.path.realpath(os.fspath(path)) if isinstance(path, str | bytes | os.PathLike) else ""
            full = full.decode() if isinstance(full, bytes) else full
            if not full.startswith(folder + os.sep) and full != "/dev/null":
                raise log.deny("file_access", f"write to {full or path}")
            written += 1
            if written > WRITES:
                raise log.deny("file_access", f"more than {WRITES} files opened for writing")
        elif event == "import" and armed():
            name = str(args[0])
            if name.startswith(_HIDDEN) or (name.startswith(_FOREIGN) and not from_triton()):
                raise log.deny("forbidden_import", name)
        elif event == "compile" and armed() and not sys._getframe(1).f_code.co_filename.startswith("<frozen importlib"):
            # None: a syntax tree, which namedtuple and dataclasses do not use, nor does anybody but the compiler.
            if args[1] is not None and str(args[1]) not in ("<string>", "<stdin>") and not from_triton():
                raise log.deny("tampering", f"compiles code under the name {args[1]}")
        elif event == "subprocess.Popen" and armed():
            if not tool(args[0]) or not from_triton():
                raise log.deny("subprocess", str(args[0]))
        elif event in ("ctypes.dlopen", "ctypes.dlsym", "ctypes.addressof", "ctypes.string_at", "ctypes.cdata"):
            if armed() and not from_triton() and event != "ctypes.cdata":
                raise log.deny("ctypes", f"{event} {args[0] if args else ''}")
        elif event.startswith(_CLOSED) and armed() and not from_triton():
            raise log.deny("tampering", event)

    sys.addaudithook(hook)
