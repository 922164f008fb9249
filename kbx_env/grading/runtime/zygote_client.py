"""Client of the sandbox: one warm zygote, which forks one single-use runner for each submission."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from kbx_env.errors import SandboxError
from kbx_env.grading.runtime.zygote_process import ZygoteProcess
from kbx_env.protocol import wire
from kbx_env.protocol.status import ALIVE

TIMED_BYTES = 16 << 30
"""Most bytes of a reply to a timing command: results, and tensors that were written in place."""
LOG_BYTES = 256 << 10
"""Most bytes of log after one command. An honest runner writes at most 100 denials of 300 characters; more is a flood."""
FATE_SECONDS = 5.0
"""Seconds that a process may take to end after its socket has closed. One that lives longer closed the socket itself."""
OUTSIDE = (-signal.SIGKILL, -signal.SIGTERM)
"""Exit statuses of a process that was killed from outside, by the out-of-memory killer or an operator. A submission cannot send
these signals unnoticed."""


class Zygote:
    """A warm process that forks runners and engines. Thread-safe; ``close`` ends it."""

    def __init__(self, started: ZygoteProcess | None = None) -> None:
        """Start the process, and wait until it is warm.

        Args:
            started: a process that gets warm already; by default a new one is started.

        Raises:
            SandboxError: it did not start.
        """
        self._started = ZygoteProcess() if started is None else started
        self._started.wait()
        assert self._started.process is not None
        self._folder, self._process = self._started.folder, self._started.process
        self._control, self._lost = self._started.control, False
        self._lock = threading.Lock()

    @property
    def alive(self) -> bool:
        """Whether the zygote runs and has answered all requests so far."""
        return not self._lost and self._process.poll() is None

    def spawn(self, **settings: Any) -> Runner:
        """Fork a runner or an engine.

        Args:
            **settings: JSON values for the process: its role, device, layers to leave out, ...

        Returns:
            A handle of the process.

        Raises:
            SandboxError: the zygote is gone, or the process did not start.
        """
        with contextlib.ExitStack() as on_failure, contextlib.ExitStack() as always:
            try:
                folder = tempfile.mkdtemp(dir=self._folder)
                on_failure.callback(shutil.rmtree, folder, ignore_errors=True)
                sock, runner_end = wire.connection()
                on_failure.callback(sock.close)
                always.callback(runner_end.close)
                log, log_writer = os.pipe()
                on_failure.callback(os.close, log)
                always.callback(os.close, log_writer)
                pid = self.ask(settings | {"folder": folder}, [runner_end.fileno(), log_writer])
                if pid <= 0:
                    raise OSError(-pid, os.strerror(-pid))
            except (OSError, SandboxError) as e:
                raise SandboxError(f"the sandbox could not start a process: {e}") from e
            on_failure.pop_all()
            return Runner(self, sock, pid, folder, log)

    def ask(self, request: dict[str, Any], fds: Sequence[int] = ()) -> int:
        """Send a request and read the answer, a number.

        Args:
            request: JSON object.
            fds: file descriptors that go with it.

        Returns:
            The number, as the request defines it.

        Raises:
            SandboxError: the zygote is gone, or does not answer. Then no further request is sent, because a late answer would
                be taken for the answer to the next request.
        """
        with self._lock:
            try:
                if self._lost:
                    raise ConnectionError("given up before")
                socket.send_fds(self._control, [json.dumps(request).encode()], list(fds))
                raw = self._control.recv(8)
                if len(raw) != 8:
                    raise ConnectionError("connection closed")
            except OSError as e:
                self._lost = True
                raise SandboxError(f"the sandbox is gone: {e}") from e
        return int.from_bytes(raw, "little", signed=True)

    def close(self) -> None:
        """End the zygote, all its runners, and all processes that these started."""
        self._started.close()


class Runner:
    """The grader's handle of a process that the zygote forked.

    Attributes:
        pid: id of the process.
        folder: the only folder in which the process may write.
        mail: whether the process can send large tensors through CUDA IPC; known after the first ``ask``.
    """

    def __init__(self, zygote: Zygote, sock: socket.socket, pid: int, folder: str, log: int) -> None:
        """Wrap a forked process.

        Args:
            zygote: its parent.
            sock: for commands and replies.
            pid: id of the process.
            folder: of the process; removed by ``close``.
            log: file descriptor from which its log of denied operations is read.
        """
        self._zygote, self._sock, self.pid, self.folder, self._log = zygote, sock, pid, folder, log
        self._ready = self.mail = False
        self._log_rest = b""
        os.set_blocking(log, False)

    def ask(
        self, header: dict[str, Any], blobs: list[bytes] | None = None, *, deadline: float
    ) -> tuple[dict[str, Any], list[bytearray]]:
        """Send a command and read the reply.

        Args:
            header: the command, a JSON object.
            blobs: bytes that go with it.
            deadline: in seconds of ``time.monotonic``. The start of the process may take a minute from now even if the
                deadline is earlier.

        Returns:
            The reply, and the bytes that go with it.

        Raises:
            wire.Late: no reply before the deadline.
            wire.WireError: the process died, or its reply is malformed.
            SandboxError: the process could not be set up.
        """
        self.wait_ready(max(deadline - time.monotonic(), 60.0))
        wire.send(self._sock, header, blobs or [], deadline=deadline)
        # Results at timed sizes, with tensors written in place, are larger than any correctness case.
        max_bytes = TIMED_BYTES if header.get("op") == "time" else wire.MAX_BYTES
        reply, data = wire.receive(self._sock, deadline=deadline, max_bytes=max_bytes)
        return reply, data

    def wait_ready(
        self, seconds: float, gate: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext,
        meanwhile: Callable[[], str | None] = lambda: None,
    ) -> None:  # fmt: skip
        """Wait until the process is set up. It has not seen a submission yet.

        Args:
            seconds: for each step of its start.
            gate: returns a context in which the process may make its CUDA context; no time limit holds while it is entered.
            meanwhile: called while the process makes its context; it gets what this returns once the gate is closed.

        Raises:
            SandboxError: the process could not be set up.
        """
        if self._ready:
            return
        try:
            with contextlib.ExitStack() as entered:
                hello, _ = wire.receive(self._sock, deadline=time.monotonic() + seconds)
                told: str | None = None
                while isinstance(hello.get("context"), bool):  # it asks before it makes one, and tells when it has one
                    if hello["context"]:
                        entered.enter_context(gate())
                        wire.send(self._sock, {"values": None}, [], deadline=time.monotonic() + seconds)
                        told = meanwhile()
                    else:
                        entered.close()
                        wire.send(self._sock, {"values": told}, [], deadline=time.monotonic() + seconds)
                    hello, _ = wire.receive(self._sock, deadline=time.monotonic() + seconds)
        except wire.WireError as e:
            raise SandboxError(f"runner could not start: {e}") from e
        if not hello.get("ready"):
            raise SandboxError(f"runner could not start: {hello.get('message')}")
        self._ready, self.mail = True, hello.get("mail") is True

    def log(self) -> list[Any]:
        """Read what the process wrote into its log since the last call.

        Returns:
            A row for each line: a denial as [rule, detail], or a sequence number; ``None`` for a malformed line and for a flood.
        """
        text = self._log_rest
        with contextlib.suppress(BlockingIOError):
            # The first bytes are kept: a flood neither removes an earlier denial nor keeps the grader reading.
            while len(text) < LOG_BYTES and (part := os.read(self._log, 1 << 16)):
                text += part
        rows: list[Any] = [None] if len(text) >= LOG_BYTES else []
        *lines, self._log_rest = text[:LOG_BYTES].split(b"\n")
        for line in lines:
            try:
                rows.append(wire.parse(line))
            except wire.WireError:
                rows.append(None)
        return rows

    def fate(self) -> int | None:
        """Return how a process ended that closed its socket. Waits up to ``FATE_SECONDS``.

        Returns:
            The exit status, or minus the signal that ended it; ``None`` if it still lives.

        Raises:
            SandboxError: the zygote is gone.
        """
        until = time.monotonic() + FATE_SECONDS
        # A large process takes time to end, above all one that used a GPU.
        while (status := self._zygote.ask({"fate": self.pid})) == ALIVE and time.monotonic() < until:
            pass
        return None if status == ALIVE else status

    def kill(self) -> None:
        """Kill the process group. Who waits for a reply is told that the process is gone."""
        try:
            self._zygote.ask({"end": self.pid})
        except SandboxError:
            for kill in (os.killpg, os.kill):
                with contextlib.suppress(OSError):
                    kill(self.pid, signal.SIGKILL)

    def close(self) -> None:
        """Close the socket and kill the process group: no process of a submission outlives its grading."""
        with contextlib.suppress(OSError):
            self._sock.close()
        with contextlib.suppress(OSError):
            os.close(self._log)
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> Runner:
        """Return the handle itself."""
        return self

    def __exit__(self, *exc: object) -> None:
        """End the process."""
        self.close()
