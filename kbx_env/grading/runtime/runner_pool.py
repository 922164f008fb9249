"""Processes for submissions: one each, and on a GPU the next one is started ahead of need.

To make a CUDA context takes seconds when many do it at once. A spare that no submission has seen serves the next grading that
needs one; a wrong kernel, which the CPU tier sends away, needs none.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Mapping
from typing import Any

from kbx_env.device.ipc_grader import IpcReceiver
from kbx_env.errors import SandboxError
from kbx_env.grading.runtime.zygote_client import Zygote
from kbx_env.grading.timing.gpu_lock import gpu_lock_of


class RunnerSlot:
    """A runner that has seen no submission yet, and what it was lent.

    Args:
        zygote: forks it.
        settings: what ``Zygote.spawn`` takes: ``device``, ``without``, ``torch_ops``.

    Raises:
        SandboxError: no process can be started.
    """

    def __init__(self, zygote: Zygote, settings: Mapping[str, Any]) -> None:
        self.zygote = zygote
        cuda = settings["device"] == "cuda"
        lease = gpu_lock_of(str(settings["device"]))
        with contextlib.ExitStack() as made:
            self.mailbox = _mailbox() if cuda else None
            if self.mailbox is not None:
                made.callback(self.mailbox.close)
            handle = self.mailbox.handle.hex() if self.mailbox is not None else None
            self.runner = zygote.spawn(**settings, mail=handle)
            made.callback(self.runner.close)
            if lease is not None:
                made.enter_context(lease.user(self.runner.pid))
            self._made = made.pop_all()

    def close(self) -> None:
        """End the process and take back what it was lent."""
        self._made.close()


def _mailbox() -> IpcReceiver | None:
    """A way for large tensors; without one they go through the socket."""
    with contextlib.suppress(RuntimeError):
        return IpcReceiver()
    return None


class RunnerPool:
    """Takes and keeps spares: at most one of each kind. Thread-safe."""

    def __init__(self) -> None:
        self._spare: dict[str, RunnerSlot] = {}
        self._lock, self._closed = threading.Lock(), False

    def ahead(self, zygote: Zygote, settings: Mapping[str, Any]) -> None:
        """Have a spare started, if there is none. What goes wrong with it is told when somebody needs it."""
        key = json.dumps(settings, sort_keys=True)
        with self._lock:
            old = self._spare.get(key)
            if self._closed or (old is not None and old.zygote is zygote and zygote.alive):
                return
            with contextlib.suppress(SandboxError):
                self._spare[key] = RunnerSlot(zygote, settings)
        if old is not None:
            old.close()

    def take(self, zygote: Zygote, settings: Mapping[str, Any]) -> RunnerSlot:
        """The spare, or a new one.

        Raises:
            SandboxError: no process can be started.
        """
        with self._lock:
            spare = self._spare.pop(json.dumps(settings, sort_keys=True), None)
        if spare is not None and spare.zygote is zygote and zygote.alive:
            return spare
        if spare is not None:
            spare.close()
        return RunnerSlot(zygote, settings)

    def close(self) -> None:
        """End all spares."""
        with self._lock:
            self._closed, kept, self._spare = True, list(self._spare.values()), {}
        for place in kept:
            place.close()
