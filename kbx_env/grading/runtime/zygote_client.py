"""The grader's handle on the sandbox: one warm zygote, one single-use runner per submission."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import kbx_env
from kbx_env.errors import SandboxError
from kbx_env.protocol import wire
from kbx_env.protocol.status import ALIVE

TIMED_BYTES = 16 << 30
"""Bytes of one reply to a timing command: results and everything that was written in place."""
LOG_BYTES = 256 << 10
"""A log that is longer than this after one command was flooded: it holds 100 denials of 300 characters at most."""
FATE_SECONDS = 5.0
"""How long a process may take to end after its socket has closed; one that lives on has hung up by itself."""
OUTSIDE = (-signal.SIGKILL, -signal.SIGTERM)
"""Fates that come from outside: the out-of-memory killer, an operator. A submission cannot send these signals unnoticed."""


class Zygote:
    """A warm process that forks runners. Thread-safe; ``close`` ends it."""

    def __init__(self) -> None:
        try:
            self._start()
        except OSError as e:  # no file descriptor, no process, no space: the machine's trouble
            raise SandboxError(f"the sandbox did not start: {e}") from e

    def _start(self) -> None:
        # The zygote outlives a killed grader by the moment it takes to remove this.
        self._folder = tempfile.mkdtemp(prefix="kbx-")
        try:
            self._fork()
        except OSError:
            shutil.rmtree(self._folder, ignore_errors=True)
            raise

    def _fork(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        root = str(Path(kbx_env.__file__).resolve().parent.parent)
        env = {k: v for k, v in os.environ.items() if not k.upper().endswith(("_KEY", "_TOKEN", "_SECRET"))}
        env["PYTHONPATH"] = os.pathsep.join([root, *filter(None, [env.get("PYTHONPATH")])])
        env.pop("TRITON_INTERPRET", None)
        env |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TORCH_COMPILE_DISABLE": "1"}
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "kbx_env.sandbox.zygote", str(theirs.fileno()), self._folder],
                pass_fds=[theirs.fileno()], env=env, stdin=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
        self._control, self._lost = ours, False
        self._lock = threading.Lock()
        ours.settimeout(120)
        try:
            ready = ours.recv(1)
        except OSError:
            ready = b""
        if ready != b"R":
            self.close()
            raise SandboxError("the sandbox did not start; see: python -m kbx_env doctor")

    @property
    def alive(self) -> bool:
        """Whether the zygote can still be asked."""
        return not self._lost and self._process.poll() is None

    def spawn(self, **settings: Any) -> Runner:
        """Fork a runner.

        Raises:
            SandboxError: the zygote is gone.
        """
        with contextlib.ExitStack() as mine, contextlib.ExitStack() as theirs:
            try:
                folder = tempfile.mkdtemp(dir=self._folder)
                mine.callback(shutil.rmtree, folder, ignore_errors=True)
                sock, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
                mine.callback(sock.close)
                theirs.callback(other.close)
                log, told = os.pipe()
                mine.callback(os.close, log)
                theirs.callback(os.close, told)
                pid = self.ask(settings | {"folder": folder}, [other.fileno(), told])
                if pid <= 0:
                    raise OSError(-pid, os.strerror(-pid))
            except (OSError, SandboxError) as e:
                raise SandboxError(f"the sandbox could not start a process: {e}") from e
            mine.pop_all()
            return Runner(self, sock, pid, folder, log)

    def ask(self, request: dict[str, Any], fds: Sequence[int] = ()) -> int:
        """One request, one number.

        Raises:
            SandboxError: the zygote is gone, or does not answer: it is never asked again then, because its late answer
                would be taken for that of the next request.
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
        """End the zygote and all its runners, with whatever they started."""
        with contextlib.suppress(OSError):
            self._control.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(5)
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)


class Runner:
    """One submission's process, seen from the grader."""

    def __init__(self, zygote: Zygote, sock: socket.socket, pid: int, folder: str, log: int) -> None:
        self._zygote, self._sock, self.pid, self.folder, self._log = zygote, sock, pid, folder, log
        self._ready = self.mail = False
        self._rest = b""
        os.set_blocking(log, False)

    def ask(
        self, header: dict[str, Any], blobs: list[bytes] | None = None, *, deadline: float
    ) -> tuple[dict[str, Any], list[bytearray]]:
        """One command, one reply.

        Raises:
            wire.Late: no reply before ``deadline`` (monotonic seconds).
            wire.WireError: the runner died or talked nonsense.
            SandboxError: the runner could not be set up.
        """
        if not self._ready:
            try:
                hello, _ = wire.receive(self._sock, deadline=max(deadline, time.monotonic() + 60))
            except wire.WireError as e:
                raise SandboxError(f"runner could not start: {e}") from e
            if not hello.get("ready"):
                raise SandboxError(f"runner could not start: {hello.get('message')}")
            self._ready, self.mail = True, hello.get("mail") is True
        wire.send(self._sock, header, blobs or [], deadline=deadline)
        # Results at timed sizes, with everything that was written in place, are larger than any correctness case.
        most = TIMED_BYTES if header.get("op") == "time" else wire.MAX_BYTES
        reply, data = wire.receive(self._sock, deadline=deadline, max_bytes=most)
        return reply, data

    def log(self) -> list[Any]:
        """What the process wrote into its log since the last time: denials as [rule, detail], and running numbers.

        A line that makes no sense is ``None``.
        """
        text = self._rest
        with contextlib.suppress(BlockingIOError):
            # What came first is kept: who floods the log neither pushes a denial out nor keeps the grader reading.
            while len(text) < LOG_BYTES and (part := os.read(self._log, 1 << 16)):
                text += part
        rows: list[Any] = [None] if len(text) >= LOG_BYTES else []
        *lines, self._rest = text[:LOG_BYTES].split(b"\n")
        for line in lines:
            try:
                rows.append(wire.parse(line))
            except wire.WireError:
                rows.append(None)
        return rows

    def fate(self) -> int | None:
        """Exit status of a process that hung up, minus the signal that ended it, ``None`` while it lives.

        Raises:
            SandboxError: the zygote is gone.
        """
        until = time.monotonic() + FATE_SECONDS
        # A large process takes its time to end, above all one that held a GPU.
        while (status := self._zygote.ask({"fate": self.pid})) == ALIVE and time.monotonic() < until:
            pass
        return None if status == ALIVE else status

    def close(self) -> None:
        """Hang up and kill the whole process group: nothing of a submission outlives its grading."""
        with contextlib.suppress(OSError):
            self._sock.close()
        with contextlib.suppress(OSError):
            os.close(self._log)
        try:
            self._zygote.ask({"end": self.pid})
        except SandboxError:
            for kill in (os.killpg, os.kill):
                with contextlib.suppress(OSError):
                    kill(self.pid, signal.SIGKILL)
        shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
