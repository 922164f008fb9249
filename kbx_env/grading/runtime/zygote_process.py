"""Starts the process of a zygote without waiting until it is warm. Imports neither torch nor Triton.

The process takes seconds to import them. A command that starts it first can do its own imports meanwhile.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import kbx_env
from kbx_env.bytecode import with_bytecode
from kbx_env.errors import SandboxError
from kbx_env.protocol.status import READY_BYTES
from kbx_env.spec import packs

ALLOCATOR = {
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(256 << 20), "MALLOC_TOP_PAD_": str(1 << 20),
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
}  # fmt: skip
"""Environment for glibc, in bytes: freed arrays stay in the process, and memory consists of large pages where the system has
them for those who ask. By default each array above 128 KiB is mapped and returned anew, and the kernel clears its pages, one
fault for 4 KiB: 6 million faults while 176 kernels are graded on the CPU tier, instead of 2.5 million."""
START_SECONDS = 120.0
"""Seconds that a zygote may take to get warm; a machine under full load takes up to a minute."""
_inherited: list[ZygoteProcess] = []
"""Zygotes that were forked for this process, and that it has not used yet."""


class ForkedProcess:
    """A process that another one has forked, with the methods of ``subprocess.Popen`` that a zygote needs.

    Args:
        pid: its process id.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._fd: int | None = None
        with contextlib.suppress(ProcessLookupError):  # it has ended
            self._fd = os.pidfd_open(pid)

    def poll(self) -> int | None:
        """Return ``None`` while it runs, then 0: how it ended is known to its parent alone."""
        return 0 if self._fd is None or self._ends_within(0.0) else None

    def wait(self, timeout: float | None = None) -> int:
        """Wait until it has ended.

        Args:
            timeout: seconds; ``None``: without limit.

        Returns:
            0.

        Raises:
            subprocess.TimeoutExpired: it runs still.
        """
        if self._fd is not None and not self._ends_within(timeout):
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        return 0

    def kill(self) -> None:
        """Kill it, if it runs."""
        if self._fd is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._fd, signal.SIGKILL)

    def _ends_within(self, seconds: float | None) -> bool:
        assert self._fd is not None
        poll = select.poll()
        poll.register(self._fd, select.POLLIN)
        if not poll.poll(None if seconds is None else 1000 * seconds):
            return False
        os.close(self._fd)
        self._fd = None
        return True


class ZygoteProcess:
    """The process of a zygote, and the socket on which it takes requests.

    Args:
        forked: a socket to a zygote that a ``ZygoteForkServer`` forks, and its folder; by default a process is started, or the one
            taken that this process has inherited.

    Attributes:
        folder: in which it and its runners write. If the grader is killed, the zygote removes it before it ends.
        control: takes requests once ``wait`` has returned.
        process: the process; ``None`` while a zygote server has not yet forked it.

    Raises:
        SandboxError: no file descriptor, no process, or no disk space.
    """

    folder: str
    control: socket.socket
    process: subprocess.Popen[bytes] | ForkedProcess | None

    def __init__(self, forked: tuple[socket.socket, str] | None = None) -> None:
        self._warm, self.process = False, None
        if forked is None and _inherited:
            found = _inherited.pop()
            forked = found.control, found.folder
        if forked is not None:
            self.control, self.folder = forked
            return
        try:
            self.folder = tempfile.mkdtemp(prefix="kbx-")
            try:
                self._fork()
            except OSError:
                shutil.rmtree(self.folder, ignore_errors=True)
                raise
        except OSError as e:
            raise SandboxError(f"the sandbox did not start: {e}") from e

    def _fork(self) -> None:
        self.control, zygote_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self.process = _started(zygote_end, self.folder)
        except OSError:
            self.control.close()
            raise
        finally:
            zygote_end.close()

    def wait(self) -> None:
        """Wait until the zygote is warm.

        Raises:
            SandboxError: it ended before, or took longer than ``START_SECONDS``.
        """
        self.control.settimeout(START_SECONDS)
        try:
            ready = self.control.recv(READY_BYTES, socket.MSG_WAITALL)
        except OSError:
            ready = b""
        if len(ready) != READY_BYTES:
            self.close()
            raise SandboxError("the sandbox did not start; see: python -m kbx_env doctor")
        if self.process is None:
            self.process = ForkedProcess(int.from_bytes(ready, "little"))
        self._warm = True

    def close(self) -> None:
        """End the zygote, all its runners, and all processes that these started."""
        with contextlib.suppress(OSError):
            self.control.close()
        if self._warm and self.process:  # it ends by itself, after its runners; before that it has none
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(5)
        if self.process and self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


class ZygoteForkServer:
    """A process that gets warm like a zygote, and forks zygotes: one for each grader of a pool.

    Raises:
        SandboxError: no file descriptor, or no process.
    """

    def __init__(self) -> None:
        self._control, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._process = _started(other)
        except OSError as e:
            self._control.close()
            raise SandboxError(f"the sandbox did not start: {e}") from e
        finally:
            other.close()

    def fork(self) -> ZygoteProcess:
        """Ask for a zygote, without waiting for it.

        Returns:
            The zygote, which gets warm once the zygote server is.

        Raises:
            SandboxError: the zygote server has ended, or there is no disk space.
        """
        try:
            folder = tempfile.mkdtemp(prefix="kbx-")
            control, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                socket.send_fds(self._control, [folder.encode()], [other.fileno()])
            except OSError:
                control.close()
                os.rmdir(folder)
                raise
            finally:
                other.close()
        except OSError as e:
            raise SandboxError(f"the sandbox did not start: {e}") from e
        return ZygoteProcess((control, folder))

    def leave(self) -> None:
        """Give up the zygote server in a fork of this process: this process asks it for nothing."""
        self._control.close()

    def close(self) -> None:
        """End the zygote server. Its zygotes live on until their sockets close."""
        self._control.close()
        self._process.kill()
        self._process.wait()


def inherit(zygote: ZygoteProcess) -> None:
    """Have the next ``ZygoteProcess`` of this process be one that was forked for it.

    Args:
        zygote: of a ``ZygoteForkServer``.
    """
    _inherited.append(zygote)


def _started(control: socket.socket, *folder: str) -> subprocess.Popen[bytes]:
    """Start a zygote with a folder, or a zygote server without one."""
    root = str(Path(kbx_env.__file__).resolve().parent.parent)
    env = {k: v for k, v in with_bytecode(os.environ).items() if not k.upper().endswith(("_KEY", "_TOKEN", "_SECRET"))}
    env["PYTHONPATH"] = os.pathsep.join([root, *filter(None, [env.get("PYTHONPATH")])])
    # Runners load no task: submissions need not know where task packs are.
    for name in ("TRITON_INTERPRET", packs.SELECTED, packs.REGISTERED):
        env.pop(name, None)
    env |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TORCH_COMPILE_DISABLE": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", "kbx_env.sandbox.zygote", str(control.fileno()), *folder],
        pass_fds=[control.fileno()], env=ALLOCATOR | env, stdin=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
