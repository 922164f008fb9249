"""A spare process serves whoever needs one next, and none outlives its zygote."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
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


class _Slow:
    """Stands in for a runner that starts when it is told to."""

    made: list[_Slow]
    go: threading.Event

    def __init__(self, zygote: Any, settings: Any) -> None:
        self.closed = False
        self.made.append(self)
        assert self.go.wait(10)

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> type[_Slow]:
    _Slow.made, _Slow.go = [], threading.Event()
    monkeypatch.setattr(runner_pool, "RunnerSlot", _Slow)
    return _Slow


@pytest.mark.parametrize("ahead", [True, False])
def test_a_runner_that_is_abandoned_before_it_has_started_serves_the_next_grading(slow: type[_Slow], ahead: bool) -> None:
    pool, zygote, abandoned = RunnerPool(), FakeZygote(), Future[None]()
    if ahead:
        pool.ahead(zygote, SETTINGS)  # type: ignore[arg-type]
    threading.Timer(0.05, abandoned.set_result, [None]).start()
    assert pool.take(zygote, SETTINGS, abandoned) is None  # type: ignore[arg-type]
    slow.go.set()
    assert pool.take(zygote, SETTINGS) is slow.made[0] and len(slow.made) == 1  # type: ignore[arg-type]
    pool.close()
    assert not slow.made[0].closed


def test_of_two_gradings_that_are_abandoned_one_runner_is_kept(slow: type[_Slow]) -> None:
    """Two threads share a grader: only one of them gets the spare, and the other must not wait for a start either."""
    pool, zygote, abandoned = RunnerPool(), FakeZygote(), Future[None]()
    pool.ahead(zygote, SETTINGS)  # type: ignore[arg-type]
    with ThreadPoolExecutor(2) as threads:
        taken = [threads.submit(pool.take, zygote, SETTINGS, abandoned) for _ in range(2)]  # type: ignore[arg-type]
        while len(slow.made) < 2:
            time.sleep(0.01)
        abandoned.set_result(None)
        assert [t.result(5) for t in taken] == [None, None]
    slow.go.set()
    until = time.monotonic() + 10
    while sum(s.closed for s in slow.made) < 1 and time.monotonic() < until:
        time.sleep(0.01)
    pool.close()
    assert [s.closed for s in slow.made] == [True, True]


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
