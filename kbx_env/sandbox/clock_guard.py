"""Notices that a submission has replaced a function that tells time, orders work on the GPU, or replays a graph.

The stopwatch holds its own references, so a replaced function changes no measurement. No honest kernel replaces one, so the
attempt costs the reward on both tiers.
"""

from __future__ import annotations

import inspect
import time
import types
from collections.abc import Iterator
from typing import Any

import torch
import triton

from kbx_env.sandbox.firewall import Log

_TIME = ("perf_counter", "perf_counter_ns", "monotonic", "monotonic_ns", "time", "time_ns", "process_time", "sleep")
_CUDA = ("synchronize", "Event", "Stream", "CUDAGraph", "graph", "current_stream", "default_stream", "stream", "set_stream")
_EVENT = ("__new__", "elapsed_time", "record", "synchronize", "query", "wait")
_STREAM = ("synchronize", "query", "wait_event", "wait_stream", "record_event")
_GRAPH = ("replay", "capture_begin", "capture_end", "reset")
_BENCH = ("do_bench", "do_bench_cudagraph")


class ClockGuard:
    """The functions as they were before the submission was loaded.

    Args:
        log: receives what was replaced.
    """

    def __init__(self, log: Log) -> None:
        self._log = log
        self._before = [(name, owner, key, _found(owner, key)) for name, owner, key in _guarded()]

    def check(self) -> None:
        """Log every function that is another one now; each is logged once."""
        left = []
        for row in self._before:
            name, owner, key, before = row
            if _found(owner, key) is before:
                left.append(row)
            else:
                self._log.deny("tampering", f"{name} was replaced: submissions must leave clocks, events and graphs alone")
        self._before = left


def _found(owner: Any, key: str) -> Any:
    """Return an attribute as it is stored, without running code of the owner; ``None`` if there is none."""
    if type(owner) is types.ModuleType:  # the same as below, in a tenth of the time; a module may get another class
        return types.ModuleType.__getattribute__(owner, "__dict__").get(key)
    return inspect.getattr_static(owner, key, None)


def _guarded() -> Iterator[tuple[str, Any, str]]:
    """Yield the full name, the owner and the attribute of each guarded function."""
    for key in _TIME:
        yield f"time.{key}", time, key
    for key in _CUDA:
        yield f"torch.cuda.{key}", torch.cuda, key
    for kind, keys in (("Event", _EVENT), ("Stream", _STREAM), ("CUDAGraph", _GRAPH)):
        owner = getattr(torch.cuda, kind, None)
        for key in keys if owner is not None else ():
            yield f"torch.cuda.{kind}.{key}", owner, key
    for key in _BENCH:
        yield f"triton.testing.{key}", triton.testing, key
