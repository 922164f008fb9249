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

from kbx_env import wire
from kbx_env.errors import SandboxError
from kbx_env.sandbox.zygote import ALIVE

LOG_BYTES = 1 << 20
"""Of a log longer than this the end is kept."""


class Zygote:
    """A warm process that forks runners. Thread-safe; ``close`` ends it."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        # The zygote outlives a killed grader by the moment it takes to remove this.
        self._folder = tempfile.mkdtemp(prefix="kbx-")
        root = str(Path(__file__).resolve().parents[2])
        env = {k: v for k, v in os.environ.items() if not k.upper().endswith(("_KEY", "_TOKEN", "_SECRET"))}
        env["PYTHONPATH"] = os.pathsep.join([root, *filter(None, [env.get("PYTHONPATH")])])
        env.pop("TRITON_INTERPRET", None)
        env |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TORCH_COMPILE_DISABLE": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "kbx_env.sandbox.zygote", str(theirs.fileno()), self._folder],
            pass_fds=[theirs.fileno()], env=env, stdin=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        theirs.close()
        self._control = ours
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
        """Whether the zygote can still fork."""
        return self._process.poll() is None

    def spawn(self, **settings: Any) -> Runner:
        """Fork a runner.

        Raises:
            SandboxError: the zygote is gone.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        log, told = os.pipe()
        try:
            settings["folder"] = folder = tempfile.mkdtemp(dir=self._folder)
            pid = self.ask(settings, [theirs.fileno(), told])
        except (OSError, SandboxError) as e:
            ours.close()
            os.close(log)
            raise SandboxError(f"the sandbox could not start a process: {e}") from e
        finally:
            theirs.close()
            os.close(told)
        return Runner(self, ours, pid, folder, log)

    def ask(self, request: dict[str, Any], fds: Sequence[int] = ()) -> int:
        """One request, one number.

        Raises:
            SandboxError: the zygote is gone.
        """
        try:
            with self._lock:
                socket.send_fds(self._control, [json.dumps(request).encode()], list(fds))
                raw = self._control.recv(8)
        except OSError as e:
            raise SandboxError(f"the sandbox is gone: {e}") from e
        if len(raw) != 8:
            raise SandboxError("the sandbox is gone")
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
        self._ready = False
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
            self._ready = True
        wire.send(self._sock, header, blobs or [])
        reply, data = wire.receive(self._sock, deadline=deadline)
        return reply, data

    def log(self) -> list[Any]:
        """What the process wrote into its log since the last time: denials as [rule, detail], and running numbers.

        A line that makes no sense is ``None``.
        """
        with contextlib.suppress(BlockingIOError):
            while part := os.read(self._log, 1 << 16):
                self._rest = (self._rest + part)[-LOG_BYTES:]
        *lines, self._rest = self._rest.split(b"\n")
        rows: list[Any] = []
        for line in lines:
            try:
                rows.append(json.loads(line))
            except ValueError:
                rows.append(None)
        return rows

    def fate(self) -> int | None:
        """Exit status of a process that hung up, minus the signal that ended it, ``None`` while it lives.

        Raises:
            SandboxError: the zygote is gone.
        """
        status = self._zygote.ask({"fate": self.pid})
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
