"""Executes a trace: the host's allocations, fills and copies, and every kernel launch, on memory of its own.

A submission's process never sees an input's values (but a few scalars it asks for) and never holds a result. It says
what it wants done, step by step; only what can be said here can be done: allocate, fill with one value, copy between
equal kinds of number, launch a Triton kernel. Whatever reaches an output has therefore come through these, and the
engine knows what did: provenance, traffic, launches and matrix products are facts, not claims.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import torch

from kbx_env.backends import ttir
from kbx_env.backends.engine.storage import DTYPES, Heap, Storage, TraceError, View, whole

MAX_TEXT = 8 << 20
MAX_KERNELS = 512
MAX_NAME = 200
MAX_TENSOR = 1 << 20
"""Elements of one tensor in a kernel; Triton itself refuses more."""
GRID = (2**31 - 1, 65535, 65535)
"""What a CUDA device launches."""
LENGTHS = {"alloc": 2, "free": 1, "fill": 2, "copy": 2, "host": 2, "launch": 4}
"""Parts of a step, by its name."""
MAX_ROWS = 200
"""Kernels reported one by one; the sums cover all."""


class ComputedByHost(Exception):
    """A copy that would be a computation: between kinds of numbers."""


class LaunchRefused(Exception):
    """A launch that a device would refuse."""


def _kind(dtype: torch.dtype) -> str:
    if dtype is torch.bool:
        return "bool"
    return "complex" if dtype.is_complex else "float" if dtype.is_floating_point else "int"


def may_copy(source: torch.dtype, target: torch.dtype) -> bool:
    """Whether a host copy may convert: floats to floats, integers and booleans to integers; never across."""
    a, b = _kind(source), _kind(target)
    return source is target or (a, b) in (("float", "float"), ("int", "int"), ("bool", "int"), ("complex", "complex"))


class Engine:
    """The memory and the launches of one submission."""

    def __init__(self) -> None:
        self.heap = Heap()
        self.kernels: dict[str, ttir.Module] = {}
        self.texts: dict[str, str] = {}
        self.deadline = math.inf
        self.begin(math.inf)
        self._steps: Mapping[str, Callable[..., None]] = {
            "alloc": self._alloc, "free": self._free, "fill": self._fill, "copy": self._copy, "host": self._host,
            "launch": self._launch,
        }  # fmt: skip

    def begin(self, seconds: float) -> None:
        """Start a call: the counts start anew, the memory stays."""
        self.deadline = time.monotonic() + seconds
        self.meter = ttir.Meter(detail=True)
        self.sanitizer = ttir.Sanitizer()

    # -- what the grader says ----------------------------------------------------------------------
    def input(self, name: str, base: Any, size: int, offset: int, data: bytes | bytearray) -> None:
        """An argument of the call: its storage at the address that the host code sees; no name for a result."""
        storage = self.heap.allocate(base, size)
        storage.data[offset : offset + len(data)] = np.frombuffer(data, np.uint8)
        if name:
            storage.initialised[:] = True
            storage.inputs.add(name)

    def kernel(self, key: str, text: Any, fused: Any) -> None:
        """A compiled kernel, as TTIR.

        Raises:
            Unsupported: the text is not TTIR that this executor knows.
        """
        if not isinstance(text, str) or len(text) > MAX_TEXT or len(self.kernels) >= MAX_KERNELS:
            raise TraceError("too much kernel text")
        try:
            module = ttir.parse(text, fp_fusion=fused is not False)
        except MemoryError:
            raise
        except Exception as e:
            genuine(text)
            if isinstance(e, ttir.Unsupported):
                raise
            raise ttir.Unsupported("text", detail=f"{type(e).__name__}: {e}"[:200]) from e
        if len(module.entry.name) > MAX_NAME:
            raise TraceError("a kernel's name is too long")
        if module.max_elements > MAX_TENSOR:
            raise TraceError(f"a tensor of {module.max_elements} elements")
        self.kernels[key], self.texts[key] = module, text

    def run(self, steps: Any) -> None:
        """Do the steps in order.

        Raises:
            TraceError: a step makes no sense.
            ComputedByHost: a copy would compute.
            TtirError, TimeoutError: from a launch.
        """
        if not isinstance(steps, list):
            raise TraceError("steps are not a list")
        for step in steps:
            handler = self._steps.get(step[0]) if isinstance(step, list) and step and isinstance(step[0], str) else None
            if handler is None:
                raise TraceError(f"step {str(step)[:40]!r}")
            if len(step) != 1 + LENGTHS[step[0]]:
                raise TraceError(f"step {step[0]} of {len(step) - 1} parts")
            try:
                handler(*step[1:])
            except NotImplementedError as e:  # torch lacks it for a dtype
                raise ttir.Unsupported(step[0], detail=str(e)[:200]) from e
            except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as e:
                if step[0] == "launch":  # it has looked at its arguments: a fault of the executor
                    raise
                if "allocate memory" in str(e):
                    raise MemoryError from e
                raise TraceError(f"step {step[0]}: {e}"[:300]) from e
            if time.monotonic() > self.deadline:
                raise TimeoutError("the call took too long")

    def read(self, spec: Any, *, by_host: bool = False) -> tuple[View, bytes]:
        """The elements of a view, dense in row-major order. What the host code reads must have been written."""
        view = self.heap.view(spec)
        if by_host and view.numel and not bool(view.flags(view.storage.initialised).all()):
            nowhere = ttir.Finding("uninitialised_read", "", 0, "", (0, 0, 0), "", 0, access="host", indirect=True)
            self.sanitizer.report(nowhere)
        dense = view.values().contiguous()
        return view, (dense.view(-1).view(torch.uint8).numpy().tobytes() if dense.numel() else b"")

    def origin(self, view: View) -> dict[str, Any]:
        """Where the values of a view came from."""
        count = view.numel
        flags = view.storage
        return {
            "elements": count,
            "stored": int(view.flags(flags.stored).sum()) if count else 0,
            "unwritten": count - int(view.flags(flags.initialised).sum()) if count else 0,
            "inputs": sorted(flags.inputs), "dots": sorted(flags.dots),
        }  # fmt: skip

    def facts(self) -> dict[str, Any]:
        """What the launches of this call did."""
        rows = self.meter.per_launch
        return {
            "launches": len(rows),
            "loaded": self.meter.loaded_bytes, "stored": self.meter.stored_bytes, "atomic": self.meter.atomic_bytes,
            "sectors": sum(r.loaded_sector_bytes + r.stored_sector_bytes for r in rows),
            "reread": sum(r.reread_bytes for r in rows),
            "dots": sorted(self.meter.dot_kinds), "flops": dict(self.meter.flops),
            "findings": [asdict(f) | {"text": f.text()} for f in self.sanitizer.findings],
            "kernels": self._kernels(),
        }  # fmt: skip

    def _kernels(self) -> list[dict[str, Any]]:
        """The same by kernel, with bytes by tensor."""
        rows: dict[str, dict[str, Any]] = {}
        for r in self.meter.per_launch:
            row = rows.setdefault(r.kernel, {
                "kernel": r.kernel, "launches": 0, "programs": 0, "sectors": 0, "reread": 0, "tensors": {}, "flops": {},
            })  # fmt: skip
            row["launches"] += 1
            row["programs"] += math.prod(r.grid)
            row["sectors"] += r.loaded_sector_bytes + r.stored_sector_bytes
            row["reread"] += r.reread_bytes
            for name, t in r.tensors.items():
                held = row["tensors"].setdefault(name, [0, 0, 0])
                row["tensors"][name] = [held[0] + t.loaded, held[1] + t.stored, held[2] + t.atomic]
            for unit, n in r.flops.items():
                row["flops"][unit] = row["flops"].get(unit, 0) + n
        return list(rows.values())[:MAX_ROWS]

    # -- steps -------------------------------------------------------------------------------------
    def _alloc(self, base: Any, size: Any) -> None:
        self.heap.allocate(base, size)

    def _free(self, base: Any) -> None:
        self.heap.free(base)

    def _fill(self, spec: Any, value: Any) -> None:
        view = self.heap.view(spec)
        if type(value) not in (bool, int, float):
            raise TraceError("fill value")
        if view.numel:
            try:
                view.values().fill_(value)
            except (RuntimeError, OverflowError) as e:
                raise LaunchRefused(f"cannot fill with {value!r}: {e}"[:200]) from e
            view.mark(view.storage.initialised, True)
            view.mark(view.storage.stored, False)

    def _copy(self, target: Any, source: Any) -> None:
        to, of = self.heap.view(target), self.heap.view(source)
        if not may_copy(of.dtype, to.dtype):
            raise ComputedByHost(f"a copy from {_name(of.dtype)} to {_name(to.dtype)} computes")
        if not to.numel:
            return
        try:
            values = of.values().expand(to.shape)
            initialised = of.flags(of.storage.initialised).expand(to.shape).clone()
            stored = of.flags(of.storage.stored).expand(to.shape).clone()
            to.values().copy_(values)
        except RuntimeError as e:
            raise TraceError("copy between shapes that do not fit") from e
        to.mark(to.storage.initialised, initialised)
        to.mark(to.storage.stored, stored)
        to.storage.inputs |= of.storage.inputs
        to.storage.dots |= of.storage.dots

    def _host(self, spec: Any, text: Any) -> None:
        view = self.heap.view(spec)
        try:
            data = bytes.fromhex(text)
        except (TypeError, ValueError):
            raise TraceError("host data") from None
        if len(data) != view.numel * view.dtype.itemsize:
            raise TraceError("host data of another size")
        if data:
            values = torch.frombuffer(bytearray(data), dtype=view.dtype).view(view.shape)
            view.values().copy_(values)
            view.mark(view.storage.initialised, True)
            view.mark(view.storage.stored, False)

    def _launch(self, key: Any, grid: Any, args: Any, names: Any) -> None:
        module = self.kernels.get(key) if isinstance(key, str) else None
        if module is None or not isinstance(grid, list) or len(grid) != 3 or not isinstance(args, list):
            raise TraceError("malformed launch")
        x, y, z = (whole(n, "grid", 1 << 63) for n in grid)
        size = (x, y, z)
        if any(n > top for n, top in zip(size, GRID, strict=True)):
            raise LaunchRefused(f"{module.entry.name}: grid {size}; a device launches at most {GRID}")
        if 0 in size:
            return
        values = [argument(a) for a in args]
        told = [str(n)[:60] for n in names] if isinstance(names, list) else []
        regions = [
            ttir.Region(s.base, s.data, "", None if s.initialised.all() else s.initialised, stored=s.stored)
            for s in self.heap
        ]
        fits(module, values)
        try:
            ttir.launch(
                module, size, values, regions, self.meter, deadline=self.deadline, sanitizer=self.sanitizer, names=told
            )
        except (ttir.OutOfBounds, ttir.DeviceAssert, TimeoutError, MemoryError):
            raise
        except Exception:
            genuine(self.texts[key])
            raise
        self._trace(module, values)

    def _trace(self, module: ttir.Module, values: Sequence[Any]) -> None:
        """Carry along which inputs and products reached which storage."""
        everything = list(self.heap)

        def held(arguments: frozenset[int]) -> list[Storage]:
            found = []
            for k in arguments:
                v = values[k]
                address = v.base if isinstance(v, ttir.Descriptor) else v
                s = self.heap.at(address) if isinstance(address, int) else None
                if s is not None:
                    found.append(s)
            return found

        slices = [
            (held(s.target_args), held(s.value_args | s.control_args | s.address_args), held(s.value_args), s.dots)
            for s in ttir.store_slices(module)
        ]
        if ttir.unknown_access(module):
            slices = [(everything, everything, everything, d) for _, _, _, d in slices]
        changed = True
        while changed:
            changed = False
            for targets, sources, data, dots in slices:
                inputs = set().union(*(s.inputs for s in sources))
                products = set(dots).union(*(s.dots for s in data))
                for t in targets:
                    changed = changed or not (inputs <= t.inputs and products <= t.dots)
                    t.inputs |= inputs
                    t.dots |= products


def genuine(text: str) -> None:
    """What the executor stumbles over must at least be a kernel: text that Triton's own parser and verifier accept.

    Raises:
        TraceError: it is none, so no compiler has printed it.
    """
    from triton._C.libtriton import ir, nvidia

    context = ir.context()
    ir.load_dialects(context)
    nvidia.load_dialects(context)
    with open(os.memfd_create("ttir"), "wb") as f, silent():
        f.write(text.encode("utf-8", "replace"))
        f.flush()
        try:
            ir.parse_mlir_module(f"/proc/self/fd/{f.fileno()}", context)
        except RuntimeError:
            raise TraceError("kernel text that no compiler has made") from None


@contextlib.contextmanager
def silent() -> Iterator[None]:
    """What a library writes past Python to the standard error goes nowhere: it would quote the submission."""
    kept, null = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(null, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(null)


def fits(module: ttir.Module, values: Sequence[Any]) -> None:
    """Launch arguments must be those of the kernel.

    Raises:
        TraceError: another number of them, or another kind.
    """
    types = module.entry.body.blocks[0].arg_types
    if len(values) != len(types):
        raise TraceError(f"{len(values)} launch arguments for {len(types)} parameters")
    for value, t in zip(values, types, strict=True):
        if isinstance(value, ttir.Descriptor):
            ok = t.elem == "desc" and t.pointee is not None
            ok = ok and len(t.pointee.shape) == len(value.shape) == len(value.strides)  # type: ignore[union-attr]
        else:
            ok = t.elem != "desc" and (type(value) is int or not (t.elem == "ptr" or t.dtype.kind in "ib"))
        if not ok:
            raise TraceError(f"launch argument {str(value)[:40]!r} for a parameter of type {t.elem}")


def argument(value: Any) -> Any:
    """A launch argument as the executor takes it.

    Raises:
        TraceError: neither a number nor a descriptor.
    """
    if type(value) in (int, float):
        return value
    if isinstance(value, dict) and set(value) == {"base", "shape", "strides", "padding"}:
        base = whole(value["base"], "address", 1 << 63)
        if not all(isinstance(value[k], list) for k in ("shape", "strides")):
            raise TraceError("launch argument: shape and strides of a descriptor")
        shape = [whole(n, "shape", 1 << 31) for n in value["shape"]]
        strides = [whole(n, "stride", 1 << 40) for n in value["strides"]]
        return ttir.Descriptor(base, tuple(shape), tuple(strides), str(value["padding"])[:8])
    raise TraceError(f"launch argument {str(value)[:40]!r}")


def _name(dtype: torch.dtype) -> str:
    return next((k for k, v in DTYPES.items() if v is dtype), str(dtype))
