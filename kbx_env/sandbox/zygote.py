"""The warm parent of all runners (the zygote): it has torch and triton imported and forks one runner per request.

Most runners are forks of a fork (``ClosedFork``), one for each kind of device, in which torch's kernels are replaced already.

Started as ``python -m kbx_env.sandbox.zygote FD FOLDER``. It never initialises CUDA, so its forks may. Processes that a
submission leaves behind when its runner ends become children of the zygote, which kills them.

Without a folder it is a zygote server: it forks a zygote for every request, which has a socket and a folder of its own.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import gc
import json
import os
import shutil
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from kbx_env.protocol.status import ALIVE, READY_BYTES

FATE_SECONDS = 0.5
"""Seconds that a process may take to end after its socket has closed."""
_SUBREAPER = 36
_SET_NAME = 15
"""Options of prctl."""


COLLECT_AFTER = 50_000
"""New objects in a fork after which cycles are collected. A fork lives for one grading, and Triton's compiler makes many
objects."""


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


def _called(name: str) -> None:
    """Give this process a name that ``ps`` and ``top`` show."""
    ctypes.CDLL(None).prctl(_SET_NAME, name.encode(), 0, 0, 0)


def _never_back(serve: Callable[[], None]) -> Callable[[], None]:
    """Have a fork end with an error of the system: its parent's loop would take it for a fork that failed."""

    def run() -> None:
        try:
            serve()
        except OSError:
            traceback.print_exc()
            os._exit(1)

    return run


class ClosedFork:
    """A fork of the zygote in which torch cannot compute any more: the parent of most runners of one kind of device.

    To replace torch's kernels takes longer than the rest of a runner's start, so it is done once, here. Like the zygote, this
    process runs no code of a submission. The zygote passes on the requests for its runners.

    Args:
        children: of the zygote.
        leave: closes in the fork what is open in the zygote.
        device: of the runners, ``cpu`` or ``cuda``.

    Attributes:
        pid: its process id.
        runners: the process ids of its forks that have not been ended.
        socket: takes requests.
    """

    def __init__(self, children: Children, leave: Callable[[], Any], device: str) -> None:
        self.runners = set[int]()
        self.socket, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)

        @_never_back
        def serve() -> None:
            _called("kbx-closed")
            leave()
            self.socket.close()
            from kbx_env.sandbox import firewall

            firewall.close_ahead(device)
            gc.collect()
            gc.freeze()
            Server(other, closes=False).serve()

        try:
            self.pid = children.fork(serve)
        except OSError:
            self.socket.close()
            raise
        finally:
            other.close()

    def ask(self, message: bytes, fds: Sequence[int] = ()) -> int | None:
        """Pass a request on.

        Args:
            message: the request.
            fds: file descriptors that go with it.

        Returns:
            The answer; ``None`` if the process has ended.
        """
        try:
            socket.send_fds(self.socket, [message], list(fds))
            raw = self.socket.recv(8)
        except OSError:
            return None
        return int.from_bytes(raw, "little", signed=True) if len(raw) == 8 else None


class Server:
    """Answers requests for forks on a socket.

    Args:
        control: takes requests.
        closes: whether to fork runners from a ``ClosedFork`` where that is possible.
    """

    def __init__(self, control: socket.socket, *, closes: bool) -> None:
        self._control, self._closes, self._children = control, closes, Children()
        self._closed: dict[str, ClosedFork] = {}
        self._lost = set[int]()

    def serve(self) -> None:
        """Answer until the socket closes, and end all forks then."""
        while True:
            message, fds, _, _ = socket.recv_fds(self._control, 4096, 2)
            if not message:
                self._children.end_all()
                return
            try:
                answer = self._answer(message, fds)
            except OSError as e:  # no memory for one more process; the others continue
                answer = -(e.errno or errno.EAGAIN)
            for fd in fds:
                os.close(fd)
            self._control.sendall(answer.to_bytes(8, "little", signed=True))

    def _answer(self, message: bytes, fds: Sequence[int]) -> int:
        settings = json.loads(message)
        pid = int(settings.get("end", settings.get("fate", 0)))
        device = next((d for d, fork in self._closed.items() if pid in fork.runners), None)
        if device is not None:
            answer = self._closed[device].ask(message)
            if answer is not None:
                self._closed[device].runners -= {pid} if "end" in settings else set()
                return answer
            self._lose(device)
        if pid in self._lost:  # the zygote adopts the runners of a parent that was killed from outside, and kills them
            self._children.reap()
            self._lost -= {pid} if "end" in settings else set()
            return -signal.SIGKILL
        if "end" in settings:
            return self._children.end(pid)
        if "fate" in settings:
            return self._children.fate(pid, FATE_SECONDS)
        self._children.reap()
        if self._closes and self._may_close(settings):
            return self._fork_closed("cuda" if settings.get("device") == "cuda" else "cpu", message, fds)
        return self._children.fork(_never_back(lambda: self._become(settings, fds)))

    @staticmethod
    def _may_close(settings: Mapping[str, Any]) -> bool:
        from kbx_env.sandbox import firewall, runner

        return "role" not in settings and firewall.may_be_closed_ahead(runner.left_out(settings))

    def _fork_closed(self, device: str, message: bytes, fds: Sequence[int]) -> int:
        if device not in self._closed:
            self._closed[device] = ClosedFork(self._children, lambda: self._leave(fds), device)
        answer = self._closed[device].ask(message, fds)
        if answer is None:
            self._lose(device)
            return -errno.EAGAIN
        if answer > 0:  # the system may have used this process id for a runner that has ended
            for ended in (self._lost, *(fork.runners for fork in self._closed.values())):
                ended.discard(answer)
            self._closed[device].runners.add(answer)
        return answer

    def _lose(self, device: str) -> None:
        """Give up a closed fork, which has ended, and with it its runners."""
        fork = self._closed.pop(device)
        self._lost |= fork.runners
        fork.socket.close()
        self._children.end(fork.pid)

    def _leave(self, fds: Sequence[int] = ()) -> None:
        """Close in a fork the sockets on which processes are asked for, and some file descriptors."""
        self._control.close()
        for fork in self._closed.values():
            fork.socket.close()
        for fd in fds:
            os.close(fd)

    def _become(self, settings: Mapping[str, Any], fds: Sequence[int]) -> None:
        """Serve a request for a process in the fork: this process becomes what the settings ask for."""
        from kbx_env.backends.engine import serve as engine
        from kbx_env.sandbox import recompile, runner

        _called(f"kbx-{settings.get('role', 'runner')}")
        self._leave()
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


def _fork_zygotes(control: socket.socket) -> None:
    """Fork a zygote for each socket and folder that arrive, until the socket for them closes."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks how a zygote ended, so the system forgets it at once
    while True:
        message, fds, _, _ = socket.recv_fds(control, 4096, 1)
        if not message:
            return
        folder = message.decode()
        try:
            if os.fork() == 0:
                _never_back(functools.partial(_be_zygote, control, fds[0], folder))()
        except OSError:  # no memory for one more process: whoever waits for it sees that its socket closes
            traceback.print_exc()
            shutil.rmtree(folder, ignore_errors=True)
        for fd in fds:
            os.close(fd)


def _be_zygote(zygote_server: socket.socket, fd: int, folder: str) -> NoReturn:
    """Be a zygote, in a fork of a zygote server."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    zygote_server.close()
    os.setsid()
    _serve(fd, folder)


def _serve(fd: int, folder: str) -> NoReturn:
    """Serve requests for runners on a socket until it closes, and end the process. The folder of the runners goes with it."""
    try:
        control = socket.socket(fileno=fd)
        server = Server(control, closes=True)
        control.sendall(os.getpid().to_bytes(READY_BYTES, "little"))
        server.serve()
    except OSError:  # the grader is gone, so there is no one to report to
        pass
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(0)


def main() -> None:
    """Serve requests on the inherited socket until it closes."""
    fd, folder = int(sys.argv[1]), sys.argv[2:]
    import torch

    torch.set_num_threads(1)
    # All that forks need, imported once.
    from kbx_env.backends.engine import serve as engine  # noqa: F401
    from kbx_env.sandbox import recompile, runner, specialised, warm  # noqa: F401  # imports triton

    specialised.guard_compiler()
    specialised.quicken_compiler()
    warm.warm()
    # A module that a runner imports later must leave no compiled file: the audit hook would take it for a write of the submission.
    sys.dont_write_bytecode = True
    # Objects that exist now are excluded from garbage collection: a collection in a fork would copy their pages.
    gc.collect()
    gc.freeze()
    gc.set_threshold(COLLECT_AFTER)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if folder:
        _serve(fd, *folder)
    _fork_zygotes(socket.socket(fileno=fd))


if __name__ == "__main__":
    main()
