"""A device without a GPU: work is queued and done in order when somebody waits, and time passes only through work."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from kbx_env.device.driver import Driver, TensorMetadata
from kbx_env.device.ipc_grader import IpcReceiver
from kbx_env.device.ipc_runner import IpcSender
from kbx_env.device.stopwatch import Stopwatch
from kbx_env.grading.runtime.time_budget import TimeBudget
from kbx_env.grading.timing.gpu_lock import GpuHold
from kbx_env.sandbox.runner import Runner


class FakeDevice(Driver):
    """Memory is the host's. ``launch`` works in order, ``aside`` at once (another stream), ``after`` when all is done."""

    def __init__(self) -> None:
        self.queue: list[Callable[[], None]] = []
        self.late: list[Callable[[], None]] = []
        self.now_us = 0.0
        self.capturing: list[Callable[[], None]] | None = None
        self.held: dict[int, Any] = {}
        self.tensors: list[torch.Tensor] = []
        self.threads = {threading.get_ident()}
        self.emptied = 0

    def use_in_thread(self) -> None:
        self.threads.add(threading.get_ident())

    def _in_context(self) -> None:
        """As the driver does, refuse a call from a thread without a context."""
        if threading.get_ident() not in self.threads:
            raise RuntimeError("CUDA driver: failed with error 201")

    def new(self, like: torch.Tensor) -> torch.Tensor:
        """Memory that outlives the queue, as it does on a GPU, where memory is given back in stream order."""
        self.tensors.append(torch.empty_like(like))
        return self.tensors[-1]

    def put(self, to: torch.Tensor, source: torch.Tensor) -> None:
        """A copy that no name of torch has a part in."""
        a, b = TensorMetadata(to), TensorMetadata(source)
        ctypes.memmove(a.pointer, b.pointer, b.size)

    def launch(self, work: Callable[[], None], us: float = 2.0) -> None:
        def done() -> None:
            work()
            self.now_us += us

        (self.queue if self.capturing is None else self.capturing).append(done)

    def aside(self, work: Callable[[], None], us: float = 2.0) -> None:
        work()

    def after(self, work: Callable[[], None]) -> None:
        self.late.append(work)

    def alloc(self, size: int) -> int:
        self._in_context()
        buffer = ctypes.create_string_buffer(max(1, size if size < 1 << 28 else 1))
        self.held[ctypes.addressof(buffer)] = buffer
        return ctypes.addressof(buffer)

    def free(self, address: int) -> None:
        self._in_context()
        del self.held[address]

    alloc_dedicated, free_dedicated = alloc, free

    def preallocate(self, size: int) -> None:
        self._in_context()

    def share(self, address: int) -> bytes:
        return address.to_bytes(64, "little")

    def open(self, handle: bytes) -> int:
        return int.from_bytes(handle, "little")

    def copy(self, to: int, source: int, size: int) -> None:
        self._in_context()
        self.queue.append(lambda: ctypes.memmove(to, source, size) and None)

    def copy_boxes(self, to: int, source: int, at: Any, out: Any, size: Any, matrix: Any) -> None:
        count, height, width = size
        rows, pitch = matrix
        for k in range(count):
            for i in range(height):
                start = k * rows * pitch
                self.copy(
                    to + start + (out[0] + i) * pitch + out[1], source + start + (at[0] + i) * pitch + at[1], width
                )

    def fill(self, to: int, byte: int, size: int) -> None:
        self._in_context()
        if size < 1 << 28:
            self.queue.append(lambda: ctypes.memset(to, byte, size) and None)

    def read(self, source: int, size: int) -> bytes:
        self.sync()
        return ctypes.string_at(source, size)

    def event(self) -> Any:
        return SimpleNamespace(us=0.0)

    def record(self, event: Any) -> None:
        self.queue.append(lambda: setattr(event, "us", self.now_us))

    def elapsed_us(self, start: Any, end: Any) -> float:
        return float(end.us - start.us)

    def wait(self, cycles: int) -> None:
        if not cycles:  # an empty kernel
            self.launch(lambda: None, 3.4)

    def sync(self) -> None:
        self._in_context()
        done, self.queue = self.queue, []
        for one in done:  # all stay until the end: what they hold must not be freed under those that follow
            one()
        while self.late:
            self.late.pop(0)()

    def use_default_stream(self) -> None: ...

    def reset_persisting_l2(self) -> None: ...

    def empty_cache(self) -> None: ...

    def trim_cache(self, keep: int = 0) -> None: ...

    def reserved_bytes(self) -> int:
        return 1 << 60

    def give_back(self, keep: int = 0) -> None: ...

    def set_cache_limit(self, size: int) -> None: ...

    def watch_peak(self) -> Callable[[], int]:
        return lambda: 0

    def capture(self, body: Callable[[], None], reserve: int = 0) -> Callable[[], None]:
        self.capturing = []
        try:
            body()
        finally:
            graph, self.capturing = self.capturing, None
        return lambda: self.queue.extend(graph)


class FakeTalk:
    """A conversation with ``Runner.time`` in this process."""

    backend, secret, split, compiled = "cpu", b"secret", "eval", False

    def __init__(self, task: Any, device: FakeDevice, entry: Callable[..., Any], mail_bytes: int = 0) -> None:
        from contextlib import nullcontext

        from kbx_env.grading.runtime.session import RunnerSession

        self.task, self.budget, self.engine = task, TimeBudget(0.0), None
        self.mailbox = IpcReceiver(device, mail_bytes) if mail_bytes else None
        self.runner = SimpleNamespace(pid=1, mail=bool(mail_bytes))
        self.gpu = GpuHold(None)
        self._talk = RunnerSession
        me: Any = SimpleNamespace(
            stopwatch=Stopwatch("cpu", device, guards=True), interceptor=SimpleNamespace(), device="cpu",
            module={task.entry: entry}, log=SimpleNamespace(), submission=nullcontext,
            mail=IpcSender(device, self.mailbox.handle if self.mailbox else None),
        )  # fmt: skip
        me._argument = lambda d, blobs: Runner._argument(me, d, blobs)
        me._results = lambda watch, header: Runner._results(me, watch, header)
        me._prepare = lambda watch, header, blobs: Runner._prepare(me, watch, header, blobs)
        self.me = me
        self.asked: list[str] = []

    def header(self, *args: Any) -> Any:
        return self._talk.header(self, *args)  # type: ignore[arg-type]

    def ask(self, header: dict[str, Any], blobs: Any = None, **_: Any) -> Any:
        import json

        self.asked.append(header["do"])
        header = json.loads(json.dumps(header))
        reply, data = Runner.time(self.me, header, [bytearray(b) for b in blobs or []])
        return json.loads(json.dumps(reply)), [bytearray(b) for b in data]

    def finish_compiling(self) -> None:
        self.asked.append("finish")

    def _answer(self, *given: Any) -> Any:
        return self._talk._answer(self, *given)  # type: ignore[arg-type]
