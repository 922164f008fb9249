"""A spare process serves whoever needs one next, and none outlives its zygote."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from kbx_env.errors import SandboxError
from kbx_env.grading.runtime import runner_pool
from kbx_env.grading.runtime.runner_pool import RunnerPool, RunnerSlot
from kbx_env.grading.runtime.zygote_client import Runner
from kbx_env.protocol import wire

SETTINGS = {"device": "cpu", "without": [], "torch_ops": False}


class FakeZygote:
    """Counts what it starts."""

    def __init__(self) -> None:
        self.alive, self.live, self.started = True, set[int](), 0

    def spawn(self, **_: Any) -> Any:
        self.started += 1
        pid = self.started
        self.live.add(pid)
        return SimpleNamespace(pid=pid, close=lambda: self.live.discard(pid))


def _pid(place: RunnerSlot) -> int:
    return place.runner.pid


def test_a_spare_waits_for_who_needs_it() -> None:
    zygote, places = FakeZygote(), RunnerPool()
    for _ in range(3):
        places.ahead(zygote, SETTINGS)  # type: ignore[arg-type]
    first = places.take(zygote, SETTINGS)  # type: ignore[arg-type]
    assert (_pid(first), zygote.started) == (1, 1), "one is enough"
    second = places.take(zygote, SETTINGS)  # type: ignore[arg-type]
    assert _pid(second) == 2, "the second is started when it is needed"
    places.ahead(zygote, SETTINGS)  # type: ignore[arg-type]
    other = places.take(zygote, SETTINGS | {"torch_ops": True})  # type: ignore[arg-type]
    first.close()
    second.close()
    places.close()
    assert zygote.live == {_pid(other)}, "the spare was of another kind, and ended with the pool"
    assert zygote.started == 4
    places.ahead(zygote, SETTINGS)  # type: ignore[arg-type]
    assert zygote.started == 4, "nothing is started for who has closed"


def test_a_spare_of_a_zygote_that_died_is_not_used() -> None:
    old, new, places = FakeZygote(), FakeZygote(), RunnerPool()
    places.ahead(old, SETTINGS)  # type: ignore[arg-type]
    old.alive = False
    place = places.take(new, SETTINGS)  # type: ignore[arg-type]
    assert place.zygote is new and old.live == set()
    places.ahead(old, SETTINGS)  # type: ignore[arg-type]
    places.ahead(new, SETTINGS)  # type: ignore[arg-type]
    assert _pid(places.take(new, SETTINGS)) in new.live and old.live == set()  # type: ignore[arg-type]


def test_a_spare_that_did_not_start_is_started_again() -> None:
    zygote, places = FakeZygote(), RunnerPool()
    spawn, calls = zygote.spawn, []

    def fails_once(**settings: Any) -> Any:
        calls.append(settings)
        if len(calls) == 1:
            raise SandboxError("no process")
        return spawn(**settings)

    zygote.spawn = fails_once  # type: ignore[method-assign]
    places.ahead(zygote, SETTINGS)  # type: ignore[arg-type]
    assert _pid(places.take(zygote, SETTINGS)) == 1  # type: ignore[arg-type]
    assert len(calls) == 2


def test_a_runner_makes_its_context_under_the_shared_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    # Making a CUDA context disturbs whoever measures, so it must not happen while a grading holds the GPU alone. The rest
    # of the start takes seconds on a loaded machine, and must not keep who wants to measure waiting.
    events: list[str] = []

    class Lock:
        @contextlib.contextmanager
        def starting(self) -> Iterator[float]:
            events.append("taken")
            yield 0.0
            events.append("released")

        def user(self, pid: int) -> contextlib.AbstractContextManager[None]:
            return contextlib.nullcontext()

    class Zygote(FakeZygote):
        def spawn(self, **settings: Any) -> Any:
            events.append("forked")
            runner = super().spawn(**settings)

            def wait_ready(seconds: float, gate: Any, meanwhile: Any) -> None:
                with gate():
                    assert meanwhile() == b"handle".hex()
                events.append("ready")

            runner.wait_ready = wait_ready
            return runner

    monkeypatch.setattr(runner_pool, "gpu_lock_of", lambda device: Lock())
    class Mailbox:
        handle = b"handle"

        def __init__(self) -> None:
            events.append("mailbox")

        def close(self) -> None:
            assert not zygote.live, "the runner has ended before its memory is freed"
            events.append("freed")

    monkeypatch.setattr(runner_pool, "_mailbox", Mailbox)
    zygote = Zygote()
    slot = RunnerSlot(zygote, SETTINGS)  # type: ignore[arg-type]
    assert events == ["forked", "taken", "mailbox", "released", "ready"]
    slot.close()
    assert events[-1] == "freed"


def test_whoever_waits_for_a_spare_sees_it_start(monkeypatch: pytest.MonkeyPatch) -> None:
    started = threading.Event()

    class Slow:
        def __init__(self, zygote: Any, settings: Any) -> None:
            assert started.wait(10)

        def close(self) -> None:
            pass

    monkeypatch.setattr(runner_pool, "RunnerSlot", Slow)
    pool, zygote = RunnerPool(), FakeZygote()
    assert pool.spare(SETTINGS) is None
    pool.ahead(zygote, SETTINGS)  # type: ignore[arg-type]
    spare = pool.spare(SETTINGS)
    assert spare is not None and not spare.done() and pool.spare(SETTINGS | {"torch_ops": True}) is None
    started.set()
    assert isinstance(spare.result(10), Slow)
    pool.close()


def test_a_process_makes_its_context_only_while_the_gate_is_open() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    log, writer = os.pipe()
    runner, events, told = Runner(None, ours, 0, "", log), list[str](), list[Any]()  # type: ignore[arg-type]

    @contextlib.contextmanager
    def gate() -> Iterator[None]:
        events.append("open")
        yield
        events.append("closed")

    def process() -> None:
        for context, event in ((True, "context"), (False, "rest")):
            wire.send(theirs, {"ok": True, "context": context})
            told.append(wire.receive(theirs)[0]["values"])
            events.append(event)
        wire.send(theirs, {"ok": True, "ready": True, "mail": False})

    thread = threading.Thread(target=process)
    thread.start()
    runner.wait_ready(10.0, gate, lambda: "a handle")
    thread.join()
    assert events == ["open", "context", "closed", "rest"] and told == [None, "a handle"]
    for end in (ours, theirs):
        end.close()
    os.close(log)
    os.close(writer)
