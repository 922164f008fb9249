"""No-op stubs for functions that host code calls and that compute nothing.

These are profiler ranges, marks for ``torch.compile``, and timings that choose between variants. Some of the originals
import torch's compiler, some dispatch an operation of their own, some need a GPU that the CPU tier does not have.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import triton.testing
from triton.runtime.autotuner import Autotuner


class Range(contextlib.ContextDecorator):
    """A profiler range that records nothing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.name = args[0] if args else kwargs.get("name", "")

    def __enter__(self) -> Range:
        return self

    def __exit__(self, *exc: Any) -> None:
        return None


def _as_it_is(fn: Any = None, *args: Any, **kwargs: Any) -> Any:
    """Decorate a function without changing it; the decorator may be used with or without arguments."""
    return fn if fn is not None else _as_it_is


def install() -> None:
    """Replace compiler marks, which would import torch's compiler, and profiler ranges, in runners of both devices."""
    for name in ("disable", "allow_in_graph", "assume_constant_result"):
        setattr(torch.compiler, name, _as_it_is)
    for method in vars(torch.optim.Optimizer).values():
        # Methods that torch hides from its compiler import it when they are first called.
        if getattr(method, "__module__", "").startswith("torch") and hasattr(method, "__wrapped__"):
            method.__wrapped__.__dynamo_disable = method.__wrapped__
    torch.compiler.cudagraph_mark_step_begin = lambda: None  # type: ignore[assignment]
    for module in (torch.profiler, torch.autograd.profiler):
        module.record_function = Range  # type: ignore[assignment,attr-defined,misc]


def _tied(*args: Any, quantiles: Any = None, return_mode: str = "mean", **kwargs: Any) -> Any:
    """Return one millisecond for any measurement, without running it: nothing can be timed without a GPU."""
    times = [1.0] * len(quantiles) if quantiles is not None else [1.0]
    return times if len(times) > 1 or (quantiles is None and return_mode == "all") else times[0]


class _Untimed:
    """Descriptor for ``Autotuner.do_bench``: all configurations tie, so the first one is chosen."""

    def __get__(self, tuner: Any, owner: Any = None) -> Callable[..., Any]:
        return _tied

    def __set__(self, tuner: Any, value: Any) -> None:
        """Ignore the function that the submission, or ``use_cuda_graph``, would time with."""


def untimed() -> None:
    """Replace the timing functions of autotuners and of host code on the CPU tier, where nothing can be timed."""
    Autotuner.do_bench = _Untimed()  # type: ignore[assignment]
    for name in ("do_bench", "do_bench_cudagraph"):
        setattr(triton.testing, name, _tied)
    ranges: dict[str, Any] = {
        "range": Range, "mark": lambda msg: None, "range_push": lambda msg: 0, "range_pop": lambda: 0,
        "range_start": lambda msg: 0, "range_end": lambda handle: None,
    }  # fmt: skip
    for name, answer in ranges.items():
        setattr(torch.cuda.nvtx, name, answer)
