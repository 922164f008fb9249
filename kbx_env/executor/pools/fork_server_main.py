"""A pool's fork server: imports what workers need, and forks them, with a zygote for each.

Started as ``python -m kbx_env.executor.pools.fork_server_main FD GRADER``. It runs no code of a submission, and does not initialise
CUDA, so its forks may. Their zygotes are forks of a second process (``ZygoteForkServer``), because a submission's process should
not hold what the grader has imported.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Sequence
from typing import NoReturn

from kbx_env.errors import SandboxError
from kbx_env.executor.pools import worker
from kbx_env.executor.pools.fork_server import CLOSED, CORES, FATE_SECONDS, FORK
from kbx_env.executor.pools.process import GRADER
from kbx_env.grading.runtime.zygote_process import ZygoteForkServer, ZygoteProcess, inherit

PRELOADED = ("triton.compiler.code_generator", "scipy.fft", "scipy.special", "torch.fx.experimental.symbolic_shapes")
"""What some gradings import when they need it, half a second each time: imported here, workers have it."""


def _fate(pid: int) -> str:
    """Wait a moment for a child to end, and return its exit status as text; ``?`` if it lives or is none."""
    until = time.monotonic() + FATE_SECONDS
    while time.monotonic() < until:
        try:
            ended, status = os.waitpid(pid, os.WNOHANG)
        except ChildProcessError:
            return "?"
        if ended:
            return str(os.waitstatus_to_exitcode(status))
        time.sleep(0.002)
    return "?"


def _fork(grader: str, control: socket.socket, zygote_server: ZygoteForkServer | None, fds: Sequence[int]) -> None:
    """Fork a worker and its zygote."""
    zygote = None
    try:
        with contextlib.suppress(SandboxError):  # the worker starts a zygote itself then
            zygote = zygote_server.fork() if zygote_server else None
        if os.fork() == 0:
            _be_worker(grader, control, zygote_server, zygote, *fds)
    except OSError:  # no memory for one more process: the pool sees that the worker's pipes close
        traceback.print_exc()
    finally:
        if zygote:
            zygote.control.close()
        for fd in fds:
            os.close(fd)


def _be_worker(
    grader: str, control: socket.socket, zygote_server: ZygoteForkServer | None, zygote: ZygoteProcess | None,
    requests: int, replies: int,
) -> NoReturn:  # fmt: skip
    """Be a worker, in a fork of the server; ends the process."""
    status = 1
    try:
        os.setsid()
        control.close()
        if zygote_server:
            zygote_server.leave()
        if zygote:
            inherit(zygote)
        worker.serve(grader, requests, replies)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def main() -> None:
    """Import what a worker needs, and fork one for every request on the inherited socket until it closes."""
    control, grader = socket.socket(fileno=int(sys.argv[1])), sys.argv[2]
    if cores := os.environ.pop(CORES, ""):
        # Before the first thread or child process starts: they inherit the cores.
        os.sched_setaffinity(0, {int(c) for c in cores.split(",")})
    if closed := os.environ.pop(CLOSED, ""):
        from kbx_env.confinement import close_files

        close_files(closed.split(os.pathsep))
    faulthandler.enable()  # a crash in a library names the Python code that called it, on stderr
    os.dup2(2, 1)  # libraries may print to stdout, where a user of the pool may write something of his own
    with contextlib.ExitStack() as at_end:
        zygote_server = None
        if grader == GRADER:  # others may need no zygote; those that do start one for each worker
            zygote_server = at_end.enter_context(contextlib.closing(ZygoteForkServer()))
        for name in (grader.partition(":")[0], *(PRELOADED if grader == GRADER else ())):
            importlib.import_module(name)
        # The libraries stay to the end: each full collection would look at a million of their objects, and copy their pages.
        gc.collect()
        gc.freeze()
        while True:
            message, fds, _, _ = socket.recv_fds(control, 32, 2)
            if not message:
                return
            if message == FORK:
                _fork(grader, control, zygote_server, fds)
            else:
                control.send(b"%s %s" % (message, _fate(int(message)).encode()))


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    main()
