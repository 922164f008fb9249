"""Starts the process of a zygote without waiting until it is warm. Imports neither torch nor Triton.

The process takes seconds to import them. A command that starts it first can do its own imports meanwhile.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import kbx_env
from kbx_env.bytecode import with_bytecode
from kbx_env.errors import SandboxError
from kbx_env.spec import packs

ALLOCATOR = {
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(256 << 20), "MALLOC_TOP_PAD_": str(1 << 20),
}  # fmt: skip
"""Environment for glibc, in bytes: freed arrays stay in the process. By default each array above 128 KiB is mapped and returned
anew, and the kernel clears its pages: a sixth of the system's CPU seconds of a grading on the CPU tier, which makes many such
arrays."""
START_SECONDS = 120.0
"""Seconds that a zygote may take to get warm; a machine under full load takes up to a minute."""


class ZygoteProcess:
    """The process of a zygote, and the socket on which it takes requests.

    Attributes:
        folder: in which it and its runners write. If the grader is killed, the zygote removes it before it ends.
        control: takes requests once ``wait`` has returned.
        process: the process.
    """

    def __init__(self) -> None:
        """Start the process.

        Raises:
            SandboxError: no file descriptor, no process, or no disk space.
        """
        self._warm = False
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
        root = str(Path(kbx_env.__file__).resolve().parent.parent)
        env = {k: v for k, v in with_bytecode(os.environ).items() if not k.upper().endswith(("_KEY", "_TOKEN", "_SECRET"))}
        env["PYTHONPATH"] = os.pathsep.join([root, *filter(None, [env.get("PYTHONPATH")])])
        # Runners load no task: submissions need not know where task packs are.
        for name in ("TRITON_INTERPRET", packs.SELECTED, packs.REGISTERED):
            env.pop(name, None)
        env |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TORCH_COMPILE_DISABLE": "1"}
        env = ALLOCATOR | env
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "kbx_env.sandbox.zygote", str(zygote_end.fileno()), self.folder],
                pass_fds=[zygote_end.fileno()], env=env, stdin=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
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
            ready = self.control.recv(1)
        except OSError:
            ready = b""
        if ready != b"R":
            self.close()
            raise SandboxError("the sandbox did not start; see: python -m kbx_env doctor")
        self._warm = True

    def close(self) -> None:
        """End the zygote, all its runners, and all processes that these started."""
        with contextlib.suppress(OSError):
            self.control.close()
        if self._warm:  # it ends by itself, after its runners; before that it has none
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(5)
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)
