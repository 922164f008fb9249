"""The child side of ``grading/runtime/policy_script.py``: runs one script that a policy wrote, confined, under a watcher.

Started by ``BOOT`` with its arguments: the folder of the package, a socket, the script's folder, the entry, the backend,
the deadline (monotonic seconds) and whether namespaces may be used. The watcher executes no code of the script. It forks
the script's process, where the system allows it in a process namespace, which ends all processes at once however fast
they multiply; elsewhere the watcher adopts orphans, as the zygote does. When the script ends, for whatever reason, all
processes that it started are ended and its folder is removed.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import socket
import sys
import time
from typing import Any, NoReturn

from kbx_env.confinement import around, confine
from kbx_env.protocol.script_process import FILES, remove
from kbx_env.protocol.status import ALIVE
from kbx_env.sandbox import limits
from kbx_env.sandbox.zygote import Children

THREADS = 256
"""Threads that all processes of a script may have together, as the watcher counts them."""
PIDS = 320
"""The same limit in the operating system's kernel, where it has one: a watcher may be too slow for a fork bomb."""
DISK, NAMES = 1 << 30, 10_000
"""Bytes and files that its folder may hold: more could not be removed in time."""
_ETC = ("alternatives", "group", "host.conf", "hosts", "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "localtime", "nsswitch.conf",
        "os-release", "passwd", "ssl/certs", "timezone")  # fmt: skip
_SYSTEM = (
    "/usr",
    "/bin",
    "/sbin",
    "/lib",
    "/lib64",
    "/opt",
    "/nix/store",
    "/proc",
    "/sys",
    *(f"/etc/{n}" for n in _ETC),
)
KILL_SECONDS = 0.8
"""How long the watcher kills what a script leaves behind, where there is no process namespace."""
_NEWNS, _NEWIPC, _NEWUSER, _NEWPID = 0x00020000, 0x08000000, 0x10000000, 0x20000000
_PRIVATE, _PLAIN = 1 << 18 | 1 << 14, 2 | 4 | 8
_DIE_WITH_PARENT = 1
_FAILED = "failed "


class _Script(Exception):
    """Leaves the watcher's code in the script's process, so that it ends like any Python, exit handlers included."""


def main() -> tuple[bytes, str, str, int, bool]:
    """Start the script and watch it until all of its processes have ended.

    Returns:
        The arguments of ``compile`` for the script: this returns in the script's process alone, never in the watcher.
    """
    _, fd, folder, entry, backend, deadline, namespaces = sys.argv[1:]
    try:
        _watch(socket.socket(fileno=int(fd)), folder, backend, float(deadline), namespaces == "yes")
    except _Script:
        pass
    path = os.path.join(folder, FILES, entry)
    sys.argv, sys.path[0:0] = [entry], [os.path.dirname(path)]
    for name in [n for n in sys.modules if n.split(".")[0] == "kbx_env"]:
        del sys.modules[name]
    top = vars(sys.modules["__main__"])
    for name in [n for n in top if not n.startswith("__")]:
        del top[name]
    top["__file__"] = path
    with open(path, "rb") as f:
        return f.read(), path, "exec", 0, True


def _watch(control: socket.socket, folder: str, backend: str, deadline: float, namespaces: bool) -> NoReturn:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    children, libc = Children(), ctypes.CDLL(None, use_errno=True)
    apart = namespaces and _unshare(libc)
    with contextlib.suppress(OSError):
        # Where it is allowed, the watcher gets a real-time priority, so that the script cannot slow it; forks do not inherit it.
        os.sched_setscheduler(0, os.SCHED_FIFO | os.SCHED_RESET_ON_FORK, os.sched_param(1))
    reader, writer = os.pipe()

    def script() -> None:
        try:
            control.close()
            os.close(reader)
            libc.prctl(_DIE_WITH_PARENT, signal.SIGKILL, 0, 0, 0)
            if apart:
                _first(libc, writer)
                os.setsid()
                libc.prctl(_DIE_WITH_PARENT, signal.SIGKILL, 0, 0, 0)
            _confined(folder, backend)
            os.close(writer)
        except BaseException as e:  # never back into the watcher's code
            os.write(writer, f"{_FAILED}{type(e).__name__}: {e}"[:1000].encode())
            os._exit(1)
        raise _Script

    answer: dict[str, Any] = {"status": None}
    try:
        if time.monotonic() < deadline:
            pid = children.fork(script)
            os.close(writer)
            answer = _waited(control, children, pid, folder, backend, deadline)
    except OSError as e:
        answer = {"error": str(e)}
    if not apart:
        _kill_below()
    children.end_all(KILL_SECONDS)
    os.set_blocking(reader, False)
    with contextlib.suppress(OSError):
        report = os.read(reader, 4096).decode()
        if report.startswith(_FAILED):
            answer = {"error": report[len(_FAILED) :]}
        elif apart and answer.get("status") is not None and "note" not in answer:
            answer["status"] = int(report) if report else -signal.SIGKILL
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_OTHER | os.SCHED_RESET_ON_FORK, os.sched_param(0))
    remove(folder)
    with contextlib.suppress(OSError):
        control.sendall(json.dumps(answer).encode())
    os._exit(0)


def _unshare(libc: ctypes.CDLL) -> bool:
    """Put later children into a new process namespace; without privileges, inside a new user namespace.

    Args:
        libc: the C library.

    Returns:
        Whether the system allowed it.
    """
    if libc.unshare(_NEWPID) == 0:
        return True
    user, group = os.getuid(), os.getgid()
    if libc.unshare(_NEWUSER | _NEWPID) != 0:
        return False
    for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
        with contextlib.suppress(OSError), open(f"/proc/self/{name}", "w") as f:
            f.write(text)
    return True


def _first(libc: ctypes.CDLL, writer: int) -> None:
    """Be the first process of a namespace, with which all others end; returns in a second one, the script's process.

    Args:
        libc: the C library.
        writer: file descriptor for the exit status of the script.
    """
    # Where the system allows it, /proc shows the namespace only: no environment or command line of other processes.
    if libc.unshare(_NEWNS) == 0 and libc.mount(None, b"/", None, ctypes.c_ulong(_PRIVATE), None) == 0:
        if libc.mount(b"proc", b"/proc", b"proc", ctypes.c_ulong(_PLAIN), None) == 0 and _own_pids():
            with contextlib.suppress(OSError), open("/proc/sys/kernel/pid_max", "w") as f:
                f.write(str(PIDS))
    libc.unshare(_NEWIPC)  # shared memory segments go with it
    pid = os.fork()
    if pid == 0:
        return
    ended = status = 0
    while ended != pid:
        ended, status = os.wait()
    os.write(writer, str(os.waitstatus_to_exitcode(status)).encode())
    os._exit(0)


def _own_pids() -> bool:
    """Whether ``pid_max`` belongs to the namespace, as from Linux 6.15 on; before that it may be the limit of the host."""
    version = [int(n) if n.isdigit() else 0 for n in os.uname().release.replace("-", ".").split(".")[:2]]
    return version >= [6, 15]


def _confined(folder: str, backend: str) -> None:
    """Confine this process, which will run the script."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as f:
        f.write("1000")  # when memory runs out, the kernel ends this process first
    os.chdir(os.path.join(folder, FILES))
    if backend == "cuda":
        limits.start_driver()
        limits.make_context()
        limits.use_context()
    confine(folder, _readable())
    limits.limit(backend)


def _readable() -> list[str]:
    """Return the readable folders: the system's and Python's libraries.

    Home folders are left out, and all of this project: its expert kernels solve the tasks.
    """
    package = os.path.realpath(sys.argv[1])
    clone = os.path.dirname(package)
    hidden = clone if os.path.exists(os.path.join(clone, "pyproject.toml")) else package
    named = [p for n in ("PATH", "LD_LIBRARY_PATH") for p in os.environ.get(n, "").split(os.pathsep)]
    named += [os.environ.get(n, "") for n in ("CUDA_HOME", "CUDA_PATH", "TRITON_PTXAS_PATH", "TRITON_LIBCUDA_PATH")]
    named += [*_SYSTEM, sys.prefix, sys.base_prefix, *sys.path]
    found = {os.path.realpath(p) for p in named if os.path.isabs(p) and os.path.exists(p)} - {os.sep}
    # Task packs have experts too. The name of the variable is ``spec.packs.REGISTERED``.
    for secret in [hidden, *(root for _, root in json.loads(os.environ.pop("KBX_PACKS", "[]")))]:
        found = {part for place in found for part in around(place, secret)}
    return sorted(found)


def _waited(
    control: socket.socket, children: Children, pid: int, folder: str, backend: str, deadline: float
) -> dict[str, Any]:
    """Wait until the script ends, the deadline passes, or the script exceeds a limit.

    Args:
        control: connection to the grader; it closes when the grader is gone.
        children: the processes of the script.
        pid: of the script's main process.
        folder: of the script, whose size is limited.
        backend: ``cpu`` or ``cuda``.
        deadline: in seconds of ``time.monotonic``.

    Returns:
        ``status``: the exit status, minus the signal, or ``None`` at the deadline; and ``note`` for an exceeded limit.
    """
    memory = limits.GPU_MEMORY if backend == "cuda" else limits.MEMORY
    next_look, hung_up = 0.0, select.poll()
    hung_up.register(control, select.POLLIN)
    while True:
        now = time.monotonic()
        if now >= deadline:
            return {"status": None}
        # The grader sends nothing: input on the socket means that it is gone and needs no answer.
        if hung_up.poll(1000 * min(0.02, deadline - now)):
            return {"status": None}
        status = children.fate(pid)
        if status != ALIVE:
            return {"status": status}
        now = time.monotonic()
        if now >= next_look:
            note = _excess(memory) or _heavy(folder)
            if note:
                return {"status": -int(signal.SIGKILL), "note": note}
            # On a host with thousands of processes one look takes long: use at most a tenth of a core.
            next_look = now + max(0.1, 10 * (time.monotonic() - now))


def _below() -> list[tuple[int, int, int]]:
    """Return process id, threads and resident pages of each descendant of this process."""
    below: dict[int, list[tuple[int, int, int]]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError, ValueError, IndexError), open(f"/proc/{name}/stat") as f:
                row = f.read().rpartition(")")[2].split()
                below.setdefault(int(row[1]), []).append((int(name), int(row[17]), int(row[21])))
    found, todo = list[tuple[int, int, int]](), [os.getpid()]
    while todo:
        rows = below.get(todo.pop(), [])
        found += rows
        todo += [pid for pid, _, _ in rows]
    return found


def _excess(memory: int) -> str:
    """Return which limit all descendants of this process together exceed; empty if none."""
    rows = _below()
    if sum(threads for _, threads, _ in rows) > THREADS:
        return f"more than {THREADS} processes and threads"
    taken = sum(pages for _, _, pages in rows) * os.sysconf("SC_PAGE_SIZE")
    return f"more than {memory >> 30} GB of memory" if taken > memory else ""


def _kill_below() -> None:
    """Kill all descendants and not just adopted orphans, which would have more children in the meantime."""
    until = time.monotonic() + KILL_SECONDS
    while time.monotonic() < until and (rows := _below()):
        for kill in (os.killpg, os.kill):
            for pid, _, _ in rows:
                with contextlib.suppress(OSError):
                    kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def _heavy(folder: str) -> str:
    """Return which limit the content of a folder exceeds; empty if none."""
    names = size = 0
    todo = [folder]
    while todo:
        try:
            with os.scandir(todo.pop()) as entries:
                for entry in entries:
                    names += 1
                    if names > NAMES:
                        return f"more than {NAMES} files"
                    with contextlib.suppress(FileNotFoundError):
                        size += entry.stat(follow_symlinks=False).st_blocks * 512
                        if entry.is_dir(follow_symlinks=False):
                            todo.append(entry.path)
        except OSError as e:
            # Removed in the meantime, or without permissions: skip it. A path that is too long may hide any number of files.
            if not isinstance(e, FileNotFoundError | PermissionError | NotADirectoryError):
                return f"a folder that cannot be looked into: {os.strerror(e.errno or 0)}"
    return f"more than {DISK >> 30} GB of files" if size > DISK else ""
