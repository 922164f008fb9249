"""What a call must cost at least: ideal bytes from the shapes, flops from the declaration, device peaks measured."""

from __future__ import annotations

import ast
import contextlib
import functools
import json
import math
import operator
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from kbx_env.errors import DeclarationError
from kbx_env.grading.reference import Expected
from kbx_env.task import Case, Task, shape_of
from kbx_env.wire import DTYPES

_OPERATORS: dict[type, Any] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Pow: operator.pow, ast.USub: operator.neg,
}  # fmt: skip


def evaluate(expression: str, names: Mapping[str, float], numel: Mapping[str, int]) -> float:
    """Evaluate arithmetic over axis names and ``numel(tensor)``; nothing else is allowed.

    Raises:
        DeclarationError: any other syntax or an unknown name.
    """

    def walk(node: ast.AST) -> float:
        match node:
            case ast.Expression(body):
                return walk(body)
            case ast.Constant(int() | float() as value):
                return value
            case ast.Name(name) if name in names:
                return names[name]
            case ast.BinOp(left, op, right) if type(op) in _OPERATORS:
                return float(_OPERATORS[type(op)](walk(left), walk(right)))
            case ast.UnaryOp(ast.USub(), value):
                return -walk(value)
            case ast.Call(ast.Name("numel"), [ast.Name(name)], []) if name in numel:
                return numel[name]
            case ast.Call(ast.Name("min" | "max" as f), [a, b], []):
                return min(walk(a), walk(b)) if f == "min" else max(walk(a), walk(b))
        raise DeclarationError(f"cost expression {expression!r}: cannot evaluate {ast.unparse(node)!r}")

    return walk(ast.parse(expression, mode="eval"))


def names(task: Task, case: Case) -> dict[str, float]:
    """Axis names and numeric arguments of a case, for expressions."""
    bound = {n: p.default for n, p in task.signature.parameters.items()} | dict(case.args)
    numbers = {k: v for k, v in bound.items() if isinstance(v, int | float) and not isinstance(v, bool)}
    # An axis group becomes the product of its sizes: "*batch" is batch, "*" alone is n unless an axis has that name.
    sizes = {k.lstrip("*") or "n": math.prod(v) if isinstance(v, tuple) else v
             for k, v in sorted(case.axes.items(), key=lambda axis: axis[0] != "*")}  # fmt: skip
    return numbers | sizes


def numels(task: Task, case: Case) -> dict[str, int]:
    """Elements of every declared tensor; 0 for an optional one that the case leaves out or gives as a number."""
    return {
        n: math.prod(shape_of(t, case.axes)) if n not in case.args and (not t.optional or n in case.given) else 0
        for n, t in task.takes.items()
    }


def flops(task: Task, case: Case, args: Mapping[str, Any] | None = None) -> int:
    """Floating-point operations that the task must do, from its declaration."""
    return int(evaluate(task.cost.flops, names(task, case), numels(task, case)))


def ideal_bytes(task: Task, case: Case, args: Mapping[str, Any], expected: Expected | None) -> int:
    """Compulsory traffic: every input read once, every output and every tensor written in place written once.

    ``expected`` is not looked at, and may be ``None``, where the task's cost model says how many bytes.
    """
    if task.cost.bytes is not None:
        return int(evaluate(task.cost.bytes, names(task, case), numels(task, case)))
    assert expected is not None
    tensors = [v for v in args.values() if isinstance(v, torch.Tensor)]
    # A returned parameter that was written is already counted once, by its name.
    outputs = [o for o, a in zip(expected.native, expected.aliases, strict=True) if a not in expected.native_written]
    return sum(t.numel() * t.element_size() for t in [*tensors, *outputs, *expected.native_written.values()])


BUFFERS = 20
"""Times its inputs that timing a case may need on the device: the slots of both sides, results, and an fp64 truth."""


def fitting(task: Task, memory: int, cases: Sequence[Case] | None = None) -> tuple[Case, ...]:
    """The timed cases (the published ones unless given) that a device with so many bytes can hold; the smallest where none does.

    A card of 24 GB so has a profile of its own: its report names the cases that it timed.
    """
    cases = task.timed if cases is None else cases
    need = {id(c): BUFFERS * input_bytes(task, c) for c in cases}
    kept = tuple(c for c in cases if need[id(c)] <= memory)
    return kept or (min(cases, key=lambda c: need[id(c)]),)


def input_bytes(task: Task, case: Case) -> int:
    """Bytes of the tensors that a case takes."""
    sizes = numels(task, case)
    return sum(n * DTYPES[case.dtypes.get(t, task.takes[t].dtype)].itemsize for t, n in sizes.items())


IMPOSSIBLE = 0.8
"""A time below this share of the floor is a lie."""
PLAUSIBLE = 0.9
"""Share of the roofline that kernels reach; a time that claims more is not paid until somebody has explained it."""


@dataclass(frozen=True)
class Peaks:
    """A device's measured ceilings: bytes per second and fp16 flops per second."""

    bandwidth: float
    matmul: float
    cache_bytes: int
    memory: float | None = None
    """Bytes per second of its memory by clock and width of the bus, ``None`` where the device does not tell. A copy reaches
    some 0.85 of it on an H200, so the best honest kernels lie between ``bandwidth`` and this."""

    def floor_us(self, moved: int, operations: float) -> float:
        """Microseconds below which no kernel can run; traffic that may stay in L2 is not counted."""
        return 1e6 * max(max(0, moved - self.cache_bytes) / self.bandwidth, operations / (4 * self.matmul))

    def share(self, moved: int, operations: float, us: float) -> float | None:
        """Share of the roofline that a time claims; ``None`` where nothing has to be moved or computed.

        The roofline is what the memory's chips can, not what a copy was seen to reach: a good kernel may be as fast as that.
        Where the device does not tell, a copy counts as ``PLAUSIBLE`` of it.
        """
        best = self.memory or self.bandwidth / PLAUSIBLE
        least = 1e6 * max(max(0, moved - self.cache_bytes) / best, operations / (4 * self.matmul))
        return least / us if least else None


KEPT_SECONDS = 86_400.0
"""After so long ceilings are measured again: a card may throttle today."""


@functools.cache
def measured_peaks(device: str, kept: Path | None = None) -> Peaks:
    """The ceilings of this machine's GPU, measured once for all processes (a second or two, alone on the GPU).

    Args:
        device: of torch.
        kept: the file that other processes find them in; ``None`` for none.
    """
    with contextlib.suppress(OSError, ValueError, TypeError):
        if kept is not None and time.time() - kept.stat().st_mtime < KEPT_SECONDS:
            return Peaks(**json.loads(kept.read_text()))
    peaks = _measure(device)
    torch.cuda.empty_cache()
    if kept is not None:
        with contextlib.suppress(OSError):
            new = kept.with_name(f"{kept.name}.{os.getpid()}")
            new.write_text(json.dumps(asdict(peaks)))
            new.replace(kept)  # at once: nobody reads half of it
    return peaks


def _measure(device: str) -> Peaks:
    """Time a large copy and a large product.

    The matmul ceiling is taken four times: int8 and fp8 products run twice as fast as fp16, sparse ones again.
    """

    def best(call: Any, reps: int) -> float:
        times = []
        for _ in range(reps):
            torch.cuda.synchronize()
            start = time.perf_counter()
            call()
            torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
        return min(times)

    a = torch.empty(1 << 30, dtype=torch.uint8, device=device)
    b = torch.empty_like(a)
    bandwidth = 2 * a.numel() / best(lambda: b.copy_(a), 6)
    m = torch.randn(8192, 8192, device=device, dtype=torch.float16)
    matmul = 2 * 8192**3 / best(lambda: m @ m, 6)
    properties = torch.cuda.get_device_properties(0)
    clock, width = getattr(properties, "memory_clock_rate", 0), getattr(properties, "memory_bus_width", 0)
    # kHz, two transfers a clock, bits.
    memory = clock * 1e3 * 2 * width / 8 if clock and width else None
    # A wrong answer of the driver's must not make honest kernels look too fast.
    known = memory if memory is not None and memory >= bandwidth else None
    return Peaks(bandwidth, matmul, properties.L2_cache_size, known)
