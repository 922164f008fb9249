"""A pool of runners, one process for each submission. On a GPU the next runner is started ahead of need.

Making a CUDA context takes seconds when many processes do it at once, and keeps the driver from others who allocate memory. So
runners make theirs one at a time under the shared lock of the GPU, while no grading measures. The rest of their start keeps no
grading from measuring. A spare runner that no submission has seen serves the next grading that needs one. A kernel that the CPU
tier finds wrong needs none, unless it was loaded beside its proof (``grading/speculative_compile.py``).
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any

from kbx_env.device.ipc_grader import IpcReceiver
from kbx_env.errors import SandboxError
from kbx_env.grading.runtime.zygote_client import Zygote
from kbx_env.grading.timing.gpu_lock import gpu_lock_of

START_SECONDS = 60.0
"""Seconds that a runner may take for each step of its start; a machine under full load takes some."""


class RunnerSlot:
    """A runner that has seen no submission yet, with its mailbox and its entry among the users of the GPU.

    Args:
        zygote: forks the runner.
        settings: what ``Zygote.spawn`` takes: ``device``, ``without``, ``torch_ops``.

    Raises:
        SandboxError: no process can be started.
    """

    def __init__(self, zygote: Zygote, settings: Mapping[str, Any]) -> None:
        self.zygote = zygote
        self._gpu_lock = gpu_lock = gpu_lock_of(str(settings["device"]))
        self.mailbox: IpcReceiver | None = None
        with contextlib.ExitStack() as made:
            made.callback(self._close_mailbox)
            self.runner = zygote.spawn(**settings)
            made.callback(self.runner.close)
            if gpu_lock is not None:
                made.enter_context(gpu_lock.user(self.runner.pid))
                self.runner.wait_ready(START_SECONDS, gpu_lock.starting, self._make_mailbox)
            self._made = made.pop_all()

    def _make_mailbox(self) -> str | None:
        """Make the mailbox, and return its handle for the runner."""
        self.mailbox = _mailbox()
        return None if self.mailbox is None else self.mailbox.handle.hex()

    def _close_mailbox(self) -> None:
        if self.mailbox is not None:
            self.mailbox.close()

    def end_runner(self) -> None:
        """End the process before the slot. It stays registered: for a while the driver lists it among those that have computed."""
        self.runner.kill()
        if self._gpu_lock is not None:
            self._gpu_lock.register(self.runner.pid)

    def close(self) -> None:
        """End the process and release its mailbox and its entry."""
        self._made.close()


def _mailbox() -> IpcReceiver | None:
    """Return a transport for large tensors, ``None`` where the driver has none: they then go through the socket."""
    with contextlib.suppress(RuntimeError):
        return IpcReceiver()
    return None


class RunnerPool:
    """Keeps at most one spare runner for each set of settings. Thread-safe."""

    def __init__(self) -> None:
        self._spare: dict[str, tuple[Zygote, Future[RunnerSlot]]] = {}
        self._lock, self._closed = threading.Lock(), False

    def ahead(self, zygote: Zygote, settings: Mapping[str, Any]) -> None:
        """Start a spare in the background, if there is none. An error is reported when a grading takes it.

        Args:
            zygote: forks it.
            settings: what ``Zygote.spawn`` takes.
        """
        key = json.dumps(settings, sort_keys=True)
        with self._lock:
            old = self._spare.get(key)
            if self._closed or (old is not None and old[0] is zygote and zygote.alive):
                return
            self._spare[key] = zygote, _start_in_thread(zygote, settings)
        if old is not None:
            _close(old[1])

    def take(
        self, zygote: Zygote, settings: Mapping[str, Any], abandoned: Future[None] | None = None
    ) -> RunnerSlot | None:  # fmt: skip
        """Return the spare, or a new runner, once it has started.

        Args:
            zygote: must be the one that forked the spare.
            settings: what ``Zygote.spawn`` takes.
            abandoned: nobody needs the runner any more once this is done.

        Returns:
            A runner that no submission has seen; the caller closes it. ``None`` if it was abandoned before it had started.

        Raises:
            SandboxError: no process can be started.
        """
        key = json.dumps(settings, sort_keys=True)
        with self._lock:
            spare = self._spare.pop(key, None)
        if spare is not None and not (spare[0] is zygote and zygote.alive):
            _close(spare[1])
            spare = None
        made = _start_in_thread(zygote, settings) if spare is None else spare[1]
        if not self._await_start(key, zygote, made, abandoned):
            return None
        if spare is not None and isinstance(made.exception(), SandboxError):
            made = _start_in_thread(zygote, settings)
            if not self._await_start(key, zygote, made, abandoned):
                return None
        return made.result()

    def _await_start(self, key: str, zygote: Zygote, made: Future[RunnerSlot], abandoned: Future[None] | None) -> bool:
        """Wait for a runner, and keep it as a spare if it is abandoned before it has started; returns whether it has."""
        either: tuple[Future[Any], ...] = (made,) if abandoned is None else (made, abandoned)
        wait(either, return_when=FIRST_COMPLETED)
        if made.done():
            return True
        with self._lock:
            kept = not self._closed and key not in self._spare
            if kept:
                self._spare[key] = zygote, made
        if not kept:
            made.add_done_callback(_close)
        return False

    def close(self) -> None:
        """End all spares."""
        with self._lock:
            self._closed, kept, self._spare = True, list(self._spare.values()), {}
        for _, made in kept:
            _close(made)


def _start_in_thread(zygote: Zygote, settings: Mapping[str, Any]) -> Future[RunnerSlot]:
    """Start a runner in a thread: the start waits until no grading measures, and the caller has other work meanwhile."""
    made: Future[RunnerSlot] = Future()
    threading.Thread(target=_start, args=(made, zygote, dict(settings)), daemon=True).start()
    return made


def _start(made: Future[RunnerSlot], zygote: Zygote, settings: Mapping[str, Any]) -> None:
    try:
        made.set_result(RunnerSlot(zygote, settings))
    except BaseException as e:
        made.set_exception(e)


def _close(made: Future[RunnerSlot]) -> None:
    """End a spare once it has started."""
    with contextlib.suppress(Exception):  # it did not start
        made.result().close()
