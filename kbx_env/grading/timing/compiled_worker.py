"""Times torch.compile of a task's baseline against eager, in a process of its own: the child side of ``timing/compiled.py``.

Started as ``python -m kbx_env.grading.timing.compiled_worker``, with one JSON object on its standard input; a JSON object a line
comes
back. Whatever torch's compiler starts, keeps or breaks ends with the process, and who waits for too long kills it.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from contextvars import ContextVar
from pathlib import Path
from typing import Any, cast

import torch

from kbx_env.device.driver import Driver
from kbx_env.device.stopwatch import Stopwatch
from kbx_env.grading import compulsory_work, inputs, reference
from kbx_env.grading.sizes import at
from kbx_env.grading.timing import input_windows
from kbx_env.grading.timing import paired as clock
from kbx_env.grading.timing.contestants import EagerSide
from kbx_env.grading.timing.gpu_lock import GpuHold, GpuLock
from kbx_env.grading.timing.input_windows import InputWindows
from kbx_env.protocol.wire import assembled
from kbx_env.spec.task import Case, Task

BUDGET = 0.3
"""Seconds of measuring per case: a ratio that is kept may be measured in as few rounds as an interval allows."""
SECRET = b"compiled"
"""Seeds the inputs: no submission is near, so nothing of a grading's own secret leaves the grader."""
_DIE_WITH_PARENT = 1
_ENTRY = "kbx-gpu-"

Tell = Callable[[dict[str, Any]], None]
Compile = Callable[[Any, Any], Callable[..., Any]]


class NeedsGpu(Exception):
    """A compiled graph was called while the GPU was not held: it has been compiled, which was all that was wanted."""


class Late(Exception):
    """The compiler took longer than it may."""


class Gate:
    """Holds the GPU alone, except while something is compiled.

    Args:
        hold: of the GPU's lease.
        tell: hears ``{"state": "waiting" | "using" | "compiling"}``, so that whoever watches knows whose time passes.
        limit: seconds that all compilations together may take.
    """

    def __init__(self, hold: GpuHold, tell: Tell, limit: float = math.inf) -> None:
        self.hold, self.tell, self.limit = hold, tell, limit
        self.held, self.compiling, self.graphs, self._within = False, 0.0, 0, 0.0
        self._mine = ExitStack()

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Have the GPU alone."""
        self._enter()
        try:
            yield
        finally:
            self._leave()

    @contextlib.contextmanager
    def outside(self) -> Iterator[None]:
        """Compile: give the GPU back for as long as it takes.

        Raises:
            Late: over the limit.
        """
        was, began, within = self.held, time.monotonic(), self._within
        if was:
            self._leave()
        self.tell({"state": "compiling"})
        try:
            yield
        finally:
            self.compiling += time.monotonic() - began - (self._within - within)
            if was:
                self._enter()
        if self.compiling > self.limit:
            raise Late(f"took longer than {self.limit:.0f} s")

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """The compiler's own measurements, wherever it makes them: alone, and not on its account."""
        if self.held:
            yield
            return
        began = time.monotonic()
        with self.alone():
            yield
        self._within += time.monotonic() - began
        self.tell({"state": "compiling"})

    def backend(self, compile_fx: Compile) -> Compile:
        """A backend of torch.compile: what ``compile_fx`` makes of a graph, made outside and run only while the GPU is held."""

        def compiled(graph: Any, examples: Any) -> Callable[..., Any]:
            with self.outside():
                inner = compile_fx(graph, examples)
            self.graphs += 1

            def run(*args: Any) -> Any:
                if not self.held:
                    raise NeedsGpu
                return inner(*args)

            return run

        return compiled

    def _enter(self) -> None:
        self.tell({"state": "waiting"})
        self._mine.enter_context(self.hold.alone())
        self.held = True
        self.tell({"state": "using"})

    def _leave(self) -> None:
        self.held = False
        self._mine.close()


def baseline(task: Task, gate: Gate, compile_fx: Compile | None = None) -> Callable[..., Any]:
    """``torch.compile(task.eager or task.reference, dynamic=False)`` in its default mode, through a gate."""
    if compile_fx is None:
        from torch._inductor.compile_fx import compile_fx as inductor

        compile_fx = cast(Compile, inductor)
        _measures_inside(gate)
    # Its limit of recompilations counts for a function, over all shapes; beyond that it runs eager and says nothing.
    torch._dynamo.reset()
    return torch.compile(task.eager or task.reference, backend=gate.backend(compile_fx), dynamic=False)


class _Still:
    """A context variable that keeps its value: the compiler follows it, where a real one would break the graph."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def get(self) -> Any:
        """The value."""
        return self.value

    def set(self, value: Any) -> None:
        """Nothing: the judge's notes are not part of what is timed."""


@contextlib.contextmanager
def unhooked() -> Iterator[None]:
    """References without the judge's hooks (seams, roundings): torch.compile must not lose to what only the grader needs.

    They break graphs, and a counter among them has a function compiled again at every call, until it is eager for good.
    """
    from kbx_env.tasks import _schemes, _seams

    found = [(m, k, v) for m in (_schemes, _seams) for k, v in vars(m).items() if isinstance(v, ContextVar)]
    for module, name, value in found:
        setattr(module, name, _Still(value.get()))
    try:
        yield
    finally:
        for module, name, value in found:
            setattr(module, name, value)


def _measures_inside(gate: Gate) -> None:
    """Whether to pad a matrix inductor finds out on the GPU, in the middle of compiling."""
    from torch._inductor.runtime.benchmarking import benchmarker

    measure = type(benchmarker).benchmark_gpu

    def alone(*args: Any, **kwargs: Any) -> Any:
        with gate.inside():
            return measure(benchmarker, *args, **kwargs)

    benchmarker.benchmark_gpu = alone  # type: ignore[method-assign]


def ratio(
    task: Task, index: int, gate: Gate, *, device: str = "cuda", tools: Driver | None = None,
    compile_fx: Compile | None = None, memory: int = 0,
) -> dict[str, Any]:  # fmt: skip
    """Time of the compiled baseline over eager's for one timed case, in pairs, on values that change from call to call.

    Args:
        task: the task.
        index: of the case in ``sizes.at``.
        gate: what compiles outside and measures alone.
        device: of torch.
        tools: the device's; another one in tests.
        compile_fx: compiles a graph; inductor's by default.
        memory: bytes of the device, 0 where nobody shares them.

    Returns:
        ``ratio``, ``low`` and ``high`` of its 95 % interval, ``graphs`` compiled, ``seconds`` of compiling.
    """
    case, function = at(task, index), baseline(task, gate, compile_fx)
    size = compulsory_work.input_bytes(task, case)
    share = size / (clock.SHARE * memory) if memory else 0.0

    def room(times: int) -> contextlib.AbstractContextManager[None]:
        return gate.hold.room(times * share) if memory else contextlib.nullcontext()

    # One set of inputs is there while the compiler works, for a minute and more; calls need more than that, and not as long.
    with room(1), _given(task, case, gate, device, index) as args:
        gate.tell({"state": "compiling"})
        with contextlib.suppress(NeedsGpu):
            function(**assembled(args))
    with room(clock.COMPILING), _given(task, case, gate, device, index) as args:
        gate.tell({"state": "compiling"})
        # Inductor chooses between the few variants of a kernel in its first call, by their times.
        with gate.alone():
            function(**assembled(args))
            if device == "cuda":
                torch.cuda.synchronize()
    # As for a grading: what needs more than the rest of the memory takes it from the others before it stands in line.
    more = (clock.MEASURING * size - (1 - clock.SHARE) * 0.8 * memory) / (clock.SHARE * memory) if memory else 0.0
    with gate.hold.room(more) if more > 0 else contextlib.nullcontext(), gate.alone():
        ring = _ring(task, case, index, device)
        sides = [EagerSide(task, case, device, Stopwatch(device, tools), f) for f in (None, function)]
        try:
            about_us = sum(side.prepare(ring) for side in sides)
            paired = clock.pair(sides[0], sides[1], ring=ring, budget=BUDGET, about_us=about_us)
        finally:
            for side in sides:
                side.watch.close()
    low, high = sorted((math.exp(-paired.low), math.exp(-paired.high)))
    row = {"ratio": math.exp(-paired.log_ratio), "low": low, "high": high}
    return row | {"graphs": gate.graphs, "seconds": round(gate.compiling, 2)}


@contextlib.contextmanager
def _given(task: Task, case: Case, gate: Gate, device: str, index: int) -> Iterator[dict[str, Any]]:
    """Arguments of a first call. One graph is compiled without the GPU; where it breaks, with pauses in having it."""
    with gate.hold.using():
        args = reference.resolve(_draw(task, case, index, 0, device), device)
    try:
        with reference.exact_matmul():
            yield args
    finally:
        args.clear()
        _give_back()


def _draw(task: Task, case: Case, index: int, repeat: int, device: str) -> dict[str, Any]:
    return inputs.draw(task, case, inputs.case_seed(SECRET, task.id, "time", index, repeat), device)


def _ring(task: Task, case: Case, index: int, device: str) -> InputWindows:
    seeds = [inputs.case_seed(SECRET, task.id, "time", index, k) for k in range(input_windows.MORE)]
    return InputWindows.draw(task, case, seeds, device)


def _give_back() -> None:
    gc.collect()  # compiled code and its cycles keep their inputs alive
    clock._give_back()


def failed(error: Exception) -> dict[str, Any]:
    """What went wrong in one line, by the compiler's own error, not what wraps it; whether another try may help."""
    inner = getattr(error, "inner_exception", None) or error
    text = " ".join(str(inner).split())
    # Of a compiler that fails the next try fails too; a GPU that is full or lost is the machine's trouble.
    again = isinstance(inner, torch.cuda.OutOfMemoryError | OSError) or "CUDA error" in text
    return {"why": (text if isinstance(inner, Late) else f"{type(inner).__name__}: {text}")[:200], "again": again}


def measure(asked: Mapping[str, Any], tell: Tell, **how: Any) -> None:
    """Every case that was asked for: a row with ``ratio``, or ``why`` there is none, with ``again`` where another try may help."""
    from kbx_env.spec.catalog import load_task

    task, folder = load_task(asked["task"]), asked.get("lease")
    for index in asked["cases"]:
        gate = Gate(GpuHold(_lease(Path(folder)) if folder else None), tell, float(asked["limit"]))
        tell({"state": "compiling", "case": index})
        try:
            with unhooked():
                row = ratio(task, index, gate, **how)
        except Exception as e:
            row = failed(e)
        tell({"case": index, **row})
        torch._dynamo.reset()
        _give_back()


def _lease(folder: Path) -> GpuLock:
    """The lease whose folder this is."""
    return GpuLock(folder.name.removeprefix(f"{_ENTRY}{os.getuid()}-"), folder.parent)


def main() -> None:
    """Serve one request."""
    ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL, 0, 0, 0)
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever a library prints must not land between the answers
    asked = json.loads(sys.stdin.readline())
    how = {"memory": torch.cuda.get_device_properties(0).total_memory}
    measure(asked, lambda row: print(json.dumps(row), file=out, flush=True), **how)


if __name__ == "__main__":
    main()
