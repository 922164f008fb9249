"""Times torch.compile of a task's baseline against eager in a process of its own, for ``timing/compiled.py``.

Started as ``python -m kbx_env.grading.timing.compiled_worker`` with one JSON object on its standard input; it answers
with one JSON object per line. Everything that torch's compiler starts, caches or breaks ends with the process. The
parent kills a process that takes too long.
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

from kbx_env.device.driver import Driver, give_back
from kbx_env.device.stopwatch import Stopwatch
from kbx_env.grading import compulsory_work, inputs, reference
from kbx_env.grading.sizes import at
from kbx_env.grading.timing import input_windows
from kbx_env.grading.timing.contestants import EagerContestant
from kbx_env.grading.timing.gpu_lock import GpuHold, GpuLock
from kbx_env.grading.timing.input_windows import InputWindows
from kbx_env.grading.timing.paired import pair
from kbx_env.grading.timing.reservations import COUNT_MEMORY, MEASURE_MEMORY, SHARE
from kbx_env.protocol.wire import assembled
from kbx_env.spec.task import Case, Task

BUDGET = 0.3
"""Seconds of measuring per case: a stored ratio needs no more rounds than an interval does."""
SECRET = b"compiled"
"""Seeds the inputs. No submission runs here, so the worker needs none of a grading's secret."""
_DIE_WITH_PARENT = 1
"""``PR_SET_PDEATHSIG`` of ``prctl``."""
_LOCK_PREFIX = "kbx-gpu-"
"""Beginning of the name of a GPU lock's folder."""

Tell = Callable[[dict[str, Any]], None]
"""Sends one JSON object to the parent."""
Compile = Callable[[Any, Any], Callable[..., Any]]
"""Compiles a graph for example inputs."""


class NeedsGpu(Exception):
    """A compiled graph was called while the GPU was not held. Ends a call that should only compile."""


class Late(Exception):
    """The compiler exceeded its time limit."""


class Gate:
    """Holds the GPU alone, except while something is compiled.

    Args:
        hold: this process's use of the GPU lock.
        tell: gets ``{"state": "waiting" | "using" | "compiling"}``, so that the parent knows which time limit applies.
        limit: seconds that all compilations together may take.

    Attributes:
        held: whether the GPU is held.
        compiling: seconds of compiling so far, without the compiler's own measurements.
        graphs: graphs compiled so far.
    """

    def __init__(self, hold: GpuHold, tell: Tell, limit: float = math.inf) -> None:
        self.hold, self.tell, self.limit = hold, tell, limit
        self.held, self.compiling, self.graphs, self._measuring = False, 0.0, 0, 0.0
        self._contexts = ExitStack()

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Hold the GPU alone within the block."""
        self._enter()
        try:
            yield
        finally:
            self._leave()

    @contextlib.contextmanager
    def outside(self) -> Iterator[None]:
        """Release the GPU within the block, which compiles.

        Raises:
            Late: compiling took longer than the limit.
        """
        was_held, began, measuring = self.held, time.monotonic(), self._measuring
        if was_held:
            self._leave()
        self.tell({"state": "compiling"})
        try:
            yield
        finally:
            self.compiling += time.monotonic() - began - (self._measuring - measuring)
            if was_held:
                self._enter()
        if self.compiling > self.limit:
            raise Late(f"took longer than {self.limit:.0f} s")

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """Hold the GPU alone within the block, in which the compiler measures; its seconds do not count as
        compiling.
        """
        if self.held:
            yield
            return
        began = time.monotonic()
        with self.alone():
            yield
        self._measuring += time.monotonic() - began
        self.tell({"state": "compiling"})

    def backend(self, compile_fx: Compile) -> Compile:
        """Return a backend for torch.compile that compiles without the GPU and runs compiled graphs only while it is
        held.

        Args:
            compile_fx: compiles a graph.

        Returns:
            The backend. Its compiled graphs raise ``NeedsGpu`` while the GPU is not held.
        """

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
        """Take the GPU."""
        self.tell({"state": "waiting"})
        self._contexts.enter_context(self.hold.alone())
        self.held = True
        self.tell({"state": "using"})

    def _leave(self) -> None:
        """Release the GPU."""
        self.held = False
        self._contexts.close()


def baseline(task: Task, gate: Gate, compile_fx: Compile | None = None) -> Callable[..., Any]:
    """Return ``torch.compile(task.eager or task.reference, dynamic=False)`` in its default mode, through a gate.

    Args:
        task: the task.
        gate: compiles without the GPU.
        compile_fx: compiles a graph; inductor's by default.

    Returns:
        The function. It compiles when it is called.
    """
    if compile_fx is None:
        from torch._inductor.compile_fx import compile_fx as inductor

        compile_fx = cast(Compile, inductor)
        _measures_inside(gate)
    # torch limits the recompilations of a function over all shapes; beyond the limit it silently runs eager.
    torch._dynamo.reset()
    return torch.compile(task.eager or task.reference, backend=gate.backend(compile_fx), dynamic=False)


class _Constant:
    """Stands in for a context variable and keeps its value: a real one would break the compiled graph."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def get(self) -> Any:
        """Return the value."""
        return self.value

    def set(self, value: Any) -> None:
        """Do nothing: what references record for the judge is not timed."""


@contextlib.contextmanager
def unhooked() -> Iterator[None]:
    """Switch off the judge's hooks in references (seams, roundings) within the block: torch.compile must not pay for
    them.

    They break graphs, and one is a counter: it causes a recompilation at every call, until torch gives up and runs
    eager.
    """
    from kbx_env.tasks import _schemes, _seams

    found = [(m, k, v) for m in (_schemes, _seams) for k, v in vars(m).items() if isinstance(v, ContextVar)]
    for module, name, value in found:
        setattr(module, name, _Constant(value.get()))
    try:
        yield
    finally:
        for module, name, value in found:
            setattr(module, name, value)


def _measures_inside(gate: Gate) -> None:
    """Make inductor hold the GPU when it measures: it decides by measurements, while it compiles, whether to pad a
    matrix.
    """
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
    """Measure the time of the compiled baseline over eager's for one timed case, in pairs, on values that change at
    each call.

    Args:
        task: the task.
        index: of the case in ``sizes.at``.
        gate: compiles without the GPU and measures with it.
        device: of torch.
        tools: driver functions of the device; others in tests.
        compile_fx: compiles a graph; inductor's by default.
        memory: bytes of the device; 0 if it is not shared.

    Returns:
        ``ratio``, ``low`` and ``high`` of its 95 % interval, ``graphs`` compiled, ``seconds`` of compiling.
    """
    case, function = at(task, index), baseline(task, gate, compile_fx)
    size = compulsory_work.input_bytes(task, case)
    share = size / (SHARE * memory) if memory else 0.0

    def room(times: int) -> contextlib.AbstractContextManager[None]:
        return gate.hold.room(times * share) if memory else contextlib.nullcontext()

    # Compiling takes a minute and more, but only one set of inputs; calls need more memory for a shorter time.
    with room(1), _first_args(task, case, gate, device, index) as args:
        gate.tell({"state": "compiling"})
        with contextlib.suppress(NeedsGpu):
            function(**assembled(args))
    with room(COUNT_MEMORY), _first_args(task, case, gate, device, index) as args:
        gate.tell({"state": "compiling"})
        # In the first call inductor chooses between variants of a kernel by their times.
        with gate.alone():
            function(**assembled(args))
            if device == "cuda":
                torch.cuda.synchronize()
    # As in a grading: memory beyond the rest is reserved before this process queues for the GPU.
    more = (MEASURE_MEMORY * size - (1 - SHARE) * 0.8 * memory) / (SHARE * memory) if memory else 0.0
    with gate.hold.room(more) if more > 0 else contextlib.nullcontext(), gate.alone():
        windows = _windows(task, case, index, device)
        contestants = [EagerContestant(task, case, device, Stopwatch(device, tools), f) for f in (None, function)]
        try:
            about_us = sum(contestant.prepare(windows) for contestant in contestants)
            paired = pair(contestants[0], contestants[1], windows=windows, budget=BUDGET, about_us=about_us)
        finally:
            for contestant in contestants:
                contestant.watch.close()
    low, high = sorted((math.exp(-paired.low), math.exp(-paired.high)))
    row = {"ratio": math.exp(-paired.log_ratio), "low": low, "high": high}
    return row | {"graphs": gate.graphs, "seconds": round(gate.compiling, 2)}


@contextlib.contextmanager
def _first_args(task: Task, case: Case, gate: Gate, device: str, index: int) -> Iterator[dict[str, Any]]:
    """Draw the arguments of a first call, and free them after the block.

    Args:
        task: the task.
        case: the case.
        gate: shares the GPU for the draw.
        device: of torch.
        index: of the case.

    Yields:
        Arguments by name.
    """
    with gate.hold.using():
        args = reference.resolve(_draw(task, case, index, 0, device), device)
    try:
        with reference.exact_matmul():
            yield args
    finally:
        args.clear()
        _give_back()


def _draw(task: Task, case: Case, index: int, repeat: int, device: str) -> dict[str, Any]:
    """Return one draw of a case's inputs; ``repeat`` counts the draws."""
    return inputs.draw(task, case, inputs.case_seed(SECRET, task.id, "time", index, repeat), device)


def _windows(task: Task, case: Case, index: int, device: str) -> InputWindows:
    """Return the values of a case's timed calls."""
    seeds = [inputs.case_seed(SECRET, task.id, "time", index, k) for k in range(input_windows.MAX_DRAWS)]
    return InputWindows.draw(task, case, seeds, device)


def _give_back() -> None:
    """Free unused memory of the device."""
    gc.collect()  # compiled code and its cycles keep their inputs alive
    give_back()


def failed(error: Exception) -> dict[str, Any]:
    """Describe an error in one line, by the compiler's own error and not the exception that wraps it.

    Args:
        error: the exception.

    Returns:
        ``why``, and ``again``: whether another attempt may succeed.
    """
    inner = getattr(error, "inner_exception", None) or error
    text = " ".join(str(inner).split())
    # A compiler error repeats itself; a GPU that is full or lost is a fault of the machine.
    again = isinstance(inner, torch.cuda.OutOfMemoryError | OSError) or "CUDA error" in text
    return {"why": (text if isinstance(inner, Late) else f"{type(inner).__name__}: {text}")[:200], "again": again}


def measure(request: Mapping[str, Any], tell: Tell, **options: Any) -> None:
    """Measure all cases of a request.

    Args:
        request: ``task``, ``cases`` by index, ``limit`` in seconds, and ``gpu_lock``, the folder of the GPU lock or
            ``None``.
        tell: gets the states, and for each case its row: ``ratio``; or ``why`` there is none, and ``again``.
        **options: for ``ratio``.
    """
    from kbx_env.spec.catalog import load_task

    task, folder = load_task(request["task"]), request.get("gpu_lock")
    for index in request["cases"]:
        gate = Gate(GpuHold(_gpu_lock_in(Path(folder)) if folder else None), tell, float(request["limit"]))
        tell({"state": "compiling", "case": index})
        try:
            with unhooked():
                row = ratio(task, index, gate, **options)
        except Exception as e:
            row = failed(e)
        tell({"case": index, **row})
        torch._dynamo.reset()
        _give_back()


def _gpu_lock_in(folder: Path) -> GpuLock:
    """Return the GPU lock whose files are in a folder."""
    return GpuLock(folder.name.removeprefix(f"{_LOCK_PREFIX}{os.getuid()}-"), folder.parent)


def main() -> None:
    """Serve the request on the standard input."""
    ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL, 0, 0, 0)
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # output of libraries must not mix with the answers
    request = json.loads(sys.stdin.readline())
    memory = torch.cuda.get_device_properties(0).total_memory
    measure(request, lambda row: print(json.dumps(row), file=out, flush=True), memory=memory)


if __name__ == "__main__":
    main()
