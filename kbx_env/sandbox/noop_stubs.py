"""What host code calls to be watched or compiled, not to compute: harmless in every runner, because it does nothing there.

Ranges for a profiler, marks for ``torch.compile``, timings that choose between variants. Some of them would import torch's
compiler, some would dispatch an operation of their own, some need a GPU that the CPU tier does not have.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import triton.testing
from triton.runtime.autotuner import Autotuner


class Range(contextlib.ContextDecorator):
    """A named range that nobody records."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.name = args[0] if args else kwargs.get("name", "")

    def __enter__(self) -> Range:
        return self

    def __exit__(self, *exc: Any) -> None:
        return None


def _as_it_is(fn: Any = None, *args: Any, **kwargs: Any) -> Any:
    """A decorator that changes nothing, with or without arguments."""
    return fn if fn is not None else _as_it_is


def install() -> None:
    """Marks for the compiler, which would import it, and the profiler's ranges, in a runner of either device."""
    for name in ("disable", "allow_in_graph", "assume_constant_result"):
        setattr(torch.compiler, name, _as_it_is)
    torch.compiler.cudagraph_mark_step_begin = lambda: None  # type: ignore[assignment]
    for module in (torch.profiler, torch.autograd.profiler):
        module.record_function = Range  # type: ignore[assignment,attr-defined,misc]


def _tied(*args: Any, quantiles: Any = None, return_mode: str = "mean", **kwargs: Any) -> Any:
    """Nothing can be timed without a GPU: whatever is measured takes one millisecond, and is not run for it."""
    times = [1.0] * len(quantiles) if quantiles is not None else [1.0]
    return times if len(times) > 1 or (quantiles is None and return_mode == "all") else times[0]


class _Untimed:
    """``Autotuner.do_bench`` when every configuration ties, so that the first one is taken."""

    def __get__(self, tuner: Any, owner: Any = None) -> Callable[..., Any]:
        return _tied

    def __set__(self, tuner: Any, value: Any) -> None:
        """Whatever the submission, or ``use_cuda_graph``, would time with."""


def untimed() -> None:
    """On the CPU tier nothing is timed: not by autotuners, however they would measure, and not by the host code."""
    Autotuner.do_bench = _Untimed()  # type: ignore[assignment]
    for name in ("do_bench", "do_bench_cudagraph"):
        setattr(triton.testing, name, _tied)
    ranges: dict[str, Any] = {
        "range": Range, "mark": lambda msg: None, "range_push": lambda msg: 0, "range_pop": lambda: 0,
        "range_start": lambda msg: 0, "range_end": lambda handle: None,
    }  # fmt: skip
    for name, answer in ranges.items():
        setattr(torch.cuda.nvtx, name, answer)
