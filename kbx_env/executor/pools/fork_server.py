"""Client of a pool's fork server, which imports what workers need, once, and forks every worker of the pool.

Without it each worker imports torch, and each worker's zygote imports torch and Triton: 7 s of a core for every worker.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Collection, Mapping
from pathlib import Path

import kbx_env
from kbx_env.bytecode import with_bytecode
from kbx_env.grading.runtime.zygote_process import ALLOCATOR

CORES = "KBX_CORES"
"""Environment variable with the CPU cores of the workers, separated by commas."""
CLOSED = "KBX_CLOSED"
"""Environment variable with files that workers may not write, separated as in ``PATH``: device files of other GPUs."""
FATE_SECONDS = 0.5
"""Seconds for which the server waits until a worker has ended, when it is asked how."""
FORK = b"F"
"""Request for a worker; any other request is a process id, and asks how that worker ended."""


class ForkServer:
    """The pool's handle of the process. Thread-safe.

    Args:
        grader: ``module:name`` of a callable that makes the grader of a worker.
        threads: CPU threads of torch in a worker, unless the environment sets ``OMP_NUM_THREADS``.
        extra_env: environment variables, added to those of this process.
        cores: CPU cores of the workers; by default any.
    """

    def __init__(
        self, grader: str, threads: int, extra_env: Mapping[str, str], cores: Collection[int] | None = None
    ) -> None:
        root = str(Path(kbx_env.__file__).resolve().parent.parent)
        env = {**ALLOCATOR, **with_bytecode(os.environ), **extra_env}
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
        # Each worker's torch would take every core: on 2 cores, 2 workers were half as fast as with one thread each.
        env.setdefault("OMP_NUM_THREADS", str(threads))
        if cores:
            env[CORES] = ",".join(map(str, sorted(cores)))
        self._lock = threading.Lock()
        self._control, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            # In its own session: Ctrl-C reaches the parent alone, which then ends the workers in order.
            self._process = subprocess.Popen(
                [sys.executable, "-m", "kbx_env.executor.pools.fork_server_main", str(other.fileno()), grader],
                pass_fds=[other.fileno()], stdin=subprocess.DEVNULL, env=env, start_new_session=True,
            )  # fmt: skip
        except OSError:
            self._control.close()
            raise
        finally:
            other.close()

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self._process.poll() is None

    def fork(self, requests: int, replies: int) -> None:
        """Ask for a worker. It is forked once the server is warm, and says so on ``replies``.

        Args:
            requests: file descriptor from which the worker reads requests; not closed here.
            replies: file descriptor to which it writes its process id, and then replies; not closed here.

        Raises:
            OSError: the server has ended.
        """
        with self._lock:
            socket.send_fds(self._control, [FORK], [requests, replies])

    def fate(self, pid: int) -> int | None:
        """Return how a worker ended.

        Args:
            pid: of a worker that ends or has ended.

        Returns:
            Its exit status, or minus the number of the signal that killed it; ``None`` if the server cannot say.
        """
        with self._lock:
            try:
                self._control.settimeout(2 * FATE_SECONDS)
                self._control.send(str(pid).encode())
                while True:
                    of, status = self._control.recv(32).split()
                    if int(of) == pid:  # not the late answer to an earlier question
                        return int(status)
            except (OSError, ValueError):  # it has ended, or the worker lives
                return None

    def close(self) -> None:
        """Kill the process. Workers that it has forked live on until their requests end. Closing twice does no harm."""
        self._process.kill()
        self._process.wait()
        self._control.close()
