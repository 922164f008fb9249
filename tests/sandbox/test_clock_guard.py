"""Replaced clocks, events and graphs are noticed; reading them is not."""

from __future__ import annotations

import time
import types

import pytest
import torch

from kbx_env.sandbox.clock_guard import ClockGuard
from kbx_env.sandbox.firewall import Log


@pytest.mark.parametrize(("owner", "name", "shown"), [
    (time, "perf_counter", "time.perf_counter"), (torch.cuda.Event, "elapsed_time", "torch.cuda.Event.elapsed_time"),
    (torch.cuda.CUDAGraph, "replay", "torch.cuda.CUDAGraph.replay"), (torch.cuda, "synchronize", "torch.cuda.synchronize"),
    (torch.cuda, "Event", "torch.cuda.Event"),
])  # fmt: skip
def test_a_replaced_function_is_logged_once(monkeypatch: pytest.MonkeyPatch, owner, name: str, shown: str) -> None:
    log = Log()
    guard = ClockGuard(log)
    guard.check()
    assert not log.denied
    monkeypatch.setattr(owner, name, lambda *args, **kwargs: 0.0)
    guard.check()
    guard.check()
    assert [rule for rule, _ in log.denied] == ["tampering"] and log.denied[0][1].startswith(shown)


def test_a_function_that_a_subclass_hides_is_noticed() -> None:
    class Event(torch.cuda.Event):
        pass

    log = Log()
    guard = ClockGuard(log)
    real = torch.cuda.Event
    try:
        torch.cuda.Event = Event
        guard.check()
    finally:
        torch.cuda.Event = real
    assert len(log.denied) == 1


def test_a_module_that_gets_another_class_is_noticed() -> None:
    class Other(types.ModuleType):
        sleep = property(lambda self: lambda seconds: None)

    log = Log()
    guard = ClockGuard(log)
    try:
        time.__class__ = Other
        guard.check()
    finally:
        time.__class__ = types.ModuleType
    assert [detail.partition(" ")[0] for _, detail in log.denied] == ["time.sleep"]


def test_using_clocks_is_no_attempt() -> None:
    log = Log()
    guard = ClockGuard(log)
    time.perf_counter(), time.time_ns(), torch.cuda.Event
    guard.check()
    assert not log.denied
