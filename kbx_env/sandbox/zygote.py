"""The warm parent of all runners (the zygote): it has torch and triton imported and forks one runner per request.

Started as ``python -m kbx_env.sandbox.zygote FD FOLDER``. It never initialises CUDA, so its forks may. Processes that a
submission leaves behind when its runner ends become children of the zygote, which kills them.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import gc
import json
import os
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

from kbx_env.protocol.status import ALIVE

FATE_SECONDS = 0.5
"""Seconds that a process may take to end after its socket has closed."""
_SUBREAPER = 36


class Children:
    """The processes forked here, and orphans of theirs, which this process adopts (a subreaper).

    Attributes:
        live: the process ids of forks that have not been ended.
    """

    def __init__(self) -> None:
        self.live: set[int] = set()
        self._ended: dict[int, int] = {}
        ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)

    def fork(self, serve: Callable[[], Any]) -> int:
        """Fork a process that runs ``serve``, and return its process id."""
        pid = os.fork()
        if pid == 0:
            os.setsid()
            serve()
            os._exit(0)
        self.live.add(pid)
        return pid

    def reap(self) -> None:
        """Collect ended children, and kill orphans that were adopted."""
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    break
                if pid in self.live:
                    self._ended[pid] = os.waitstatus_to_exitcode(status)
        for pid in _children() - self.live:
            for kill in (os.killpg, os.kill):
                with contextlib.suppress(OSError):
                    kill(pid, signal.SIGKILL)

    def fate(self, pid: int, seconds: float = 0.0) -> int:
        """Return how a process ended.

        Args:
            pid: a process forked here.
            seconds: how long to wait for it to end.

        Returns:
            Its exit status, minus the number of the signal that killed it, or ``ALIVE`` if it has not ended.
        """
        until = time.monotonic() + seconds
        while True:
            self.reap()
            if pid in self._ended or pid not in self.live:
                return self._ended.get(pid, ALIVE)
            if time.monotonic() >= until:
                return ALIVE
            time.sleep(0.005)

    def end(self, pid: int) -> int:
        """Kill a process and its group, and return its ``fate`` from before."""
        fate = self.fate(pid)
        if pid in self.live and fate == ALIVE:
            for kill in (os.killpg, os.kill):
                with contextlib.suppress(OSError):
                    kill(pid, signal.SIGKILL)
            # Usually it ends at once and its orphans appear here; freeing a GPU context may take longer.
            self.fate(pid, 0.05)
        self.live.discard(pid)
        self._ended.pop(pid, None)
        self.reap()
        return fate

    def end_all(self, seconds: float = 3.0) -> None:
        """Kill all forks, then their orphans for at most some seconds."""
        until = time.monotonic() + seconds
        for pid in list(self.live):
            self.end(pid)
        while _children() and time.monotonic() < until:
            self.reap()
            time.sleep(0.01)


def _children() -> set[int]:
    try:
        with open(f"/proc/self/task/{os.getpid()}/children") as f:
            return {int(p) for p in f.read().split()}
    except OSError:  # a kernel without this list
        found = set()
        for entry in os.listdir("/proc"):
            if entry.isdigit():
                with contextlib.suppress(OSError), open(f"/proc/{entry}/stat") as f:
                    if int(f.read().rpartition(")")[2].split()[1]) == os.getpid():
                        found.add(int(entry))
        return found


def main() -> None:
    """Serve requests on the inherited socket until it closes; the folder of runners goes with it."""
    control = socket.socket(fileno=int(sys.argv[1]))
    import torch

    torch.set_num_threads(1)
    from kbx_env.backends.engine import serve as engine
    from kbx_env.sandbox import recompile, runner, specialised, warm  # imports triton

    specialised.guard_compiler()
    warm.warm()
    # A module that a runner imports later must leave no compiled file: the audit hook would take it for a write of the submission.
    sys.dont_write_bytecode = True
    # Objects that exist now are excluded from garbage collection: a collection in a fork would copy their pages.
    gc.collect()
    gc.freeze()

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    children = Children()
    control.sendall(b"R")
    while True:
        message, fds, _, _ = socket.recv_fds(control, 4096, 2)
        if not message:
            children.end_all()
            return
        settings = json.loads(message)

        def serve(settings: Any = settings, fds: Any = fds) -> None:
            control.close()
            sock = socket.socket(fileno=fds[0])
            if settings.get("role") == "engine":
                os.close(fds[1])
                engine.serve(sock)
            elif settings.get("role") == "compiler":
                os.close(fds[1])
                recompile.serve(sock, settings)
            else:
                os.set_blocking(fds[1], False)
                runner.serve(sock, settings, fds[1])

        if "end" in settings:
            answer = children.end(int(settings["end"]))
        elif "fate" in settings:
            answer = children.fate(int(settings["fate"]), FATE_SECONDS)
        else:
            children.reap()
            try:
                answer = children.fork(serve)
            except OSError as e:  # no memory for one more process; the others continue
                answer = -(e.errno or errno.EAGAIN)
        for fd in fds:
            os.close(fd)
        control.sendall(answer.to_bytes(8, "little", signed=True))


if __name__ == "__main__":
    try:
        main()
    except OSError:  # the grader is gone, so there is no one to report to
        pass
    finally:
        shutil.rmtree(sys.argv[2], ignore_errors=True)
        os._exit(0)
