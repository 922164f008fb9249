"""A grading service in a thread of the test, with a grade function in place of the workers."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from kbx_env.executor import InlinePool
from kbx_env.outcome import Cases, Fault, Outcome, Stage, Verdict
from kbx_env.service.server import Server, listen
from kbx_env.service.service import Settings


class Grader:
    """Counts what it grades. ``wait`` in a source holds the grading until ``gate`` is set."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, bytes, dict[str, Any]]] = []
        self.gate = threading.Event()

    def __call__(self, task: str, source: bytes, **options: Any) -> Outcome:
        self.calls.append((task, source, options))
        if b"wait" in source:
            self.gate.wait(30)
        if b"lost" in source:
            return Outcome(task, Verdict.INFRA_FAULT, Stage.COMPILE, "cpu", "contract", Fault.INFRA, "neighbour out of memory")
        if b"wrong" in source:
            text = "<script>alert(1)</script>"
            return Outcome(task, Verdict.INCORRECT, Stage.CORRECT, "cpu", "contract", Fault.POLICY, text, Cases(1, 2))
        return Outcome(task, Verdict.CORRECT, Stage.EVIDENCE, "cpu", "contract", cases=Cases(2, 2), seconds={"total": 0.01})


@contextlib.contextmanager
def running(folder: Path, grade: Callable[..., Outcome], width: int = 2, at: int = 0, **settings: Any) -> Iterator[Server]:
    """Serve on a port of loopback (0: any free one) until the end of the block; then drain."""
    made = Settings(port=0, backend="cpu", store=str(folder / "gradings.sqlite"), **{"drain": 10.0, **settings})
    listener = listen("127.0.0.1", at)
    server = Server(made, listener, InlinePool(grade, width))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    until = time.monotonic() + 30
    while not server.started and thread.is_alive() and time.monotonic() < until:
        time.sleep(0.01)
    assert server.started
    try:
        yield server
    finally:
        stop(server)
        thread.join(30)
        assert not thread.is_alive()


def stop(server: Server) -> None:
    """Do what SIGTERM does; returns once no further grading begins."""
    queue = server.service.queue
    assert queue is not None
    held = threading.Event()
    with contextlib.suppress(RuntimeError):  # it has ended
        queue._loop.call_soon_threadsafe(lambda: (server.end(), held.set()))
        held.wait(10)
