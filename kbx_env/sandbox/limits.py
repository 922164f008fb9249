"""Protects a runner's host: an audit hook that cannot be removed, and resource limits."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import shutil
import signal
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kbx_env.sandbox.firewall import Log  # imports torch, which takes seconds; scripts of policies only set limits

_TOOLS = {"ptxas", "ptxas-blackwell", "ld.lld", "gcc", "cc", "clang", "ldconfig", "uname", "file"}
_CLOSED = (
    "socket.connect", "socket.bind", "socket.sendto", "os.exec", "os.fork", "os.forkpty", "os.posix_spawn",
    "os.system", "os.kill", "os.killpg", "os.putenv", "os.chmod", "os.chown", "os.link", "os.symlink",
    "sys.addaudithook", "sys.setprofile", "sys.settrace", "sys.monitoring.", "pty.spawn", "gc.get_objects", "gc.get_referrers",
    "signal.pthread_kill", "resource.", "code.__new__", "cpython.run_command",
)  # fmt: skip
_HIDDEN = (
    "kbx_env.tasks", "kbx_env.grading", "kbx_env.rewards", "kbx_env.baselines", "kbx_env.store", "kbx_env.executor", "kbx_env.envs",
    "kbx_env.cli", "kbx_env.eval", "kbx_env.train", "kbx_env.generate", "kbx_packs",
)  # fmt: skip
_FOREIGN = ("numpy.ctypeslib", "cffi", "numba", "cupy", "jax", "tensorflow", "torch.utils.cpp_extension",
            "torch._inductor", "torch._dynamo", "multiprocessing", "scipy")  # fmt: skip
_CTYPES = ("ctypes.dlopen", "ctypes.dlsym", "ctypes.addressof", "ctypes.string_at")
_Check = Callable[[str, tuple[Any, ...]], None]
"""Raises if an audit event, given by name and arguments, is refused."""

WRITES = 64
"""Files that a submission may open for writing, of at most ``FILE_BYTES`` each; together they must not fill a disk."""
FILE_BYTES = 16 << 20
MEMORY = 6 << 30
"""Bytes that a CPU submission may grow by."""
GPU_MEMORY = 24 << 30
"""The same on CUDA, without the address space that the driver reserves."""
DEVICE_MEMORY, DEVICE_SHARE = 48 << 30, 0.8
"""Bytes of GPU memory that a submission may have, at most this share of the GPU: other runners use it as well."""

CONNECTIONS = 2
"""Hardware queues of a submission's context (the driver's default is 8). Each costs about 10 ms when a context is made,
during which the driver keeps others waiting (docs/measurements); a submission uses one stream."""
COPY_CONNECTIONS = 1
"""The same for copies; by default as many as ``CONNECTIONS``."""


def limit(device: str) -> None:
    """Set the resource limits of this process; ``device`` is ``cpu`` or ``cuda``."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_BYTES, FILE_BYTES))
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NPROC, (4096, 4096))
    # The CUDA driver reserves hundreds of gigabytes of address space: there the limit counts writable private pages.
    kind, field, more = (resource.RLIMIT_DATA, 5, GPU_MEMORY) if device == "cuda" else (resource.RLIMIT_AS, 0, MEMORY)
    with open("/proc/self/statm") as f:
        most = int(f.read().split()[field]) * os.sysconf("SC_PAGE_SIZE") + more
    resource.setrlimit(kind, (most, most))


def start_driver() -> None:
    """Start the driver in this process, without a CUDA context: it disturbs nobody who measures.

    To be called before the process is confined: the driver starts by writing files that no submission needs to write.
    """
    import torch

    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", str(CONNECTIONS))
    os.environ.setdefault("CUDA_DEVICE_MAX_COPY_CONNECTIONS", str(COPY_CONNECTIONS))
    os.environ.setdefault("CUDA_DISABLE_PERF_BOOST", "1")  # the grader's context asks for it; asking takes the driver 7 ms
    torch.cuda._cached_device_count = torch._C._cuda_getDeviceCount()  # torch would start another library to count
    torch.cuda.init()


def make_context() -> None:
    """Make the CUDA context of this process, after ``start_driver``, and no more: the grader holds a lock meanwhile.

    Raises:
        RuntimeError: the driver refuses, for example because the GPU's memory is full.
    """
    cuda, device, context = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(), ctypes.c_void_p()
    code = cuda.cuDeviceGet(ctypes.byref(device), 0) or cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
    if code:
        raise RuntimeError(f"CUDA driver: no context could be made, error {code}")


def use_context() -> None:
    """Have torch use the context, which ``make_context`` has made, and limit its share of the GPU."""
    import torch

    torch.empty(1, device="cuda")  # no kernel, which torch would load
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(min(DEVICE_SHARE, DEVICE_MEMORY / total))


def watch(log: Log, folder: str, armed: Callable[[], bool]) -> None:
    """Install the audit hook. While ``armed()`` is true, forbidden events are logged and refused.

    Args:
        log: receives the attempts.
        folder: the only folder that may be written.
        armed: false while the runner itself works (set up, compile, answer).
    """
    from_triton = _triton_test()
    write_check = _write_check(log, folder, from_triton)
    import_check = _import_check(log, from_triton)
    compile_check = _compile_check(log, from_triton)
    process_check = _process_check(log, folder, from_triton)
    ctypes_check = _ctypes_check(log, from_triton)
    closed_check = _closed_check(log, from_triton)

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event == "open":
            check = write_check
        elif event == "import":
            check = import_check
        elif event == "compile":
            check = compile_check
        elif event == "subprocess.Popen":
            check = process_check
        elif event in _CTYPES:
            check = ctypes_check
        elif event.startswith(_CLOSED):
            check = closed_check
        else:
            return
        if armed():
            check(event, args)

    sys.addaudithook(hook)
    _close_signals(log)


def _close_signals(log: Log) -> None:
    """Refuse the functions that signal without an audit event, and handlers of signals.

    A process that kills itself would look killed from outside. A handler runs in the main thread at any time, also while the
    runner itself works and the hook is not armed.
    """
    for name in ("raise_signal", "pidfd_send_signal", "signal", "setitimer", "alarm", "set_wakeup_fd"):

        def closed(*args: Any, _name: str = name) -> Any:
            raise log.deny("tampering", f"signal.{_name}")

        for module in (signal, sys.modules["_signal"]):
            if hasattr(module, name):
                setattr(module, name, closed)


# The checks are closures and not methods: a submission cannot replace a function that no module and no class names. The
# hook keeps them in variables of its own and not in a dict or list: a submission that catches a refusal can reach the hook's
# frame, and could empty a container. Only the hook calls them, so that the audited call is always the same number of frames away.


def _triton_test() -> Callable[[], bool]:
    """Return a test whether Triton made the audited call, for use in checks."""
    triton_root = os.path.dirname(sys.modules["triton"].__file__ or "") + os.sep
    standard = os.path.dirname(os.__file__) + os.sep
    packages = os.path.dirname(os.path.dirname(triton_root)) + os.sep
    testing = triton_root + "testing.py"

    def from_triton() -> bool:
        # subprocess and importlib make calls for the compiler, so their frames are skipped: the nearest frame of other
        # code decides. Code that a submission makes under another file's name is refused where it is made
        # ("code.__new__", "compile").
        frame: Any = sys._getframe(3)  # this test, the check, the hook, the audited call
        while frame is not None:
            name = frame.f_code.co_filename
            if name.startswith(triton_root):
                return name != testing
            if not name.startswith(("<frozen ", standard, packages)):
                return False
            frame = frame.f_back
        return False

    return from_triton


def _write_check(log: Log, folder: str, from_triton: Callable[[], bool]) -> _Check:
    """Refuse to open files for writing outside the folder, and more than ``WRITES`` inside, without those of the compiler."""
    from kbx_env.sandbox.compile_cache import RunnerCache  # imports Triton, as ``Log`` does torch

    compiler_writes = RunnerCache.put.__code__
    writing = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
    written = 0

    def check(event: str, args: tuple[Any, ...]) -> None:
        nonlocal written
        path, mode, flags = (*args, None, 0)[:3]
        by_flags = isinstance(flags, int) and flags & writing
        by_mode = isinstance(mode, str) and set(mode) & set("wax+")
        if not (by_flags or by_mode) or from_triton():
            return
        full = os.path.realpath(os.fspath(path)) if isinstance(path, str | bytes | os.PathLike) else ""
        full = full.decode() if isinstance(full, bytes) else full
        if not full.startswith(folder + os.sep) and full != "/dev/null":
            raise log.deny("file_access", f"write to {full or path}")
        if sys._getframe(2).f_code is compiler_writes:  # this check, the hook, the audited call
            return
        written += 1
        if written > WRITES:
            raise log.deny("file_access", f"more than {WRITES} files opened for writing")

    return check


def _import_check(log: Log, from_triton: Callable[[], bool]) -> _Check:
    """Refuse imports of the grader, and of libraries that compute or reach memory."""

    def check(event: str, args: tuple[Any, ...]) -> None:
        name = str(args[0])
        if name.startswith(_HIDDEN) or (name.startswith(_FOREIGN) and not from_triton()):
            raise log.deny("forbidden_import", name)

    return check


def _compile_check(log: Log, from_triton: Callable[[], bool]) -> _Check:
    """Refuse to compile code under the name of a file."""

    def check(event: str, args: tuple[Any, ...]) -> None:
        if sys._getframe(2).f_code.co_filename.startswith("<frozen importlib"):
            return
        # The name is None for a syntax tree, which only Triton compiles; namedtuple and dataclasses compile "<string>".
        if args[1] is not None and str(args[1]) not in ("<string>", "<stdin>") and not from_triton():
            raise log.deny("tampering", f"compiles code under the name {args[1]}")

    return check


def _process_check(log: Log, folder: str, from_triton: Callable[[], bool]) -> _Check:
    """Refuse to start programs, except Triton's tools when Triton starts them."""

    def is_tool(executable: Any) -> bool:
        name = str(executable)
        if os.path.basename(name) not in _TOOLS:
            return False
        # By full path: a file of this name that the submission has written is no compiler.
        found = name if os.sep in name else shutil.which(name) or ""
        return not os.path.realpath(found).startswith(folder + os.sep)

    def check(event: str, args: tuple[Any, ...]) -> None:
        if not is_tool(args[0]) or not from_triton():
            raise log.deny("subprocess", str(args[0]))

    return check


def _ctypes_check(log: Log, from_triton: Callable[[], bool]) -> _Check:
    """Refuse to load libraries and to reach memory by ``ctypes``."""

    def check(event: str, args: tuple[Any, ...]) -> None:
        if not from_triton():
            raise log.deny("ctypes", f"{event} {args[0] if args else ''}")

    return check


def _closed_check(log: Log, from_triton: Callable[[], bool]) -> _Check:
    """Refuse the events of ``_CLOSED``."""

    def check(event: str, args: tuple[Any, ...]) -> None:
        if not from_triton():
            raise log.deny("tampering", event)

    return check
