"""Executes a trace: the host's allocations, fills and copies, and every kernel launch, on memory of its own.

A submission's process never sees an input's values (but a few scalars it asks for) and never holds a result. It says
what it wants done, step by step; only what can be said here can be done: allocate, fill with one value, copy between
equal kinds of number, launch a Triton kernel. Whatever reaches an output has therefore come through these, and the
engine knows what did: provenance, traffic, launches and matrix products are facts, not claims.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import torch

from kbx_env.backends import ttir
from kbx_env.backends.engine import torch_ops
from kbx_env.backends.engine.checks import argument, fits, genuine
from kbx_env.backends.engine.counters import Ledger, address, by_kernel
from kbx_env.backends.engine.storage import CONSTANT, DTYPES, INPUT, MOVED, Heap, Storage, TraceError, View, kind, whole

MAX_TEXT = 8 << 20
MAX_KERNELS = 512
MAX_NAME = 200
MAX_TENSOR = 1 << 20
"""Elements of one tensor in a kernel; Triton itself refuses more."""
GRID = (2**31 - 1, 65535, 65535)
"""What a CUDA device launches."""
HOST_BYTES = 16 << 10
"""What the host code may bring into a call as constants, fill values and launch arguments that are not tensors."""
LENGTHS = {"alloc": 2, "free": 1, "fill": 2, "copy": 2, "host": 2, "launch": 4, "torch": 5}
"""Parts of a step, by its name."""


class ComputedByHost(Exception):
    """What would be a computation by the host: a copy between kinds of numbers, or one that moves values where moving is
    the task, or more constants than sizes and seeds need. ``name`` is the rule."""

    def __init__(self, message: str, name: str = "torch_compute") -> None:
        super().__init__(message)
        self.name = name


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
        self.perturbation: ttir.Perturbation | None = None
        self.begin(math.inf)
        self._steps: Mapping[str, Callable[..., None]] = {
            "alloc": self._alloc, "free": self._free, "fill": self._fill, "copy": self._copy, "host": self._host,
            "launch": self._launch, "torch": self._torch,
        }  # fmt: skip

    def begin(
        self, seconds: float, moves: bool = False, picks: bool = False, torch_ops: bool = False, ablate: bool = False
    ) -> None:  # fmt: skip
        """Start a call: the counts start anew, the memory stays, but what lies there is no work of this call.

        Args:
            seconds: the limit.
            moves: the task only moves values: then torch may not move any.
            picks: the task picks parts of tensors, or fills them: then torch may not.
            torch_ops: the host code may compute in torch.
            ablate: leave out every launch.
        """
        self.deadline = time.monotonic() + seconds
        self.moves, self.picks, self.torch_ops, self.ablate, self.host_bytes = moves, picks, torch_ops, ablate, 0
        self._arguments: set[tuple[str, int, Any]] = set()
        self._given: list[Any] = []
        for s in self.heap:
            s.stored[:] = False
            s.origin[s.origin != CONSTANT] = MOVED
        self.meter, self.ledger = ttir.Meter(detail=True), Ledger()
        self.sanitizer = ttir.Sanitizer()

    # -- what the grader says ----------------------------------------------------------------------
    def input(self, name: str, base: Any, size: int, offset: int, data: bytes | bytearray, spec: Any) -> None:
        """An argument of the call: its storage at the address that the host code sees; no name for a result.

        ``spec`` is the view that was given.
        """
        storage = self.heap.allocate(base, size)
        storage.argument = True
        self._given.append(_order(spec))
        storage.data[offset : offset + len(data)] = np.frombuffer(data, np.uint8)
        if name:
            storage.initialised[:] = True
            storage.origin[:] = INPUT
            storage.inputs.add(name)
            storage.kinds.add(kind(DTYPES[spec[1]]))

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
        stored = view.flags(flags.stored) if count else torch.zeros(0, dtype=torch.bool)
        return {
            "elements": count,
            "stored": int(stored.sum()),
            "moved": int(((view.flags(flags.origin) == MOVED) & ~stored).sum()) if count else 0,
            "again": flags.returned and bool(count),
            "unwritten": count - int(view.flags(flags.initialised).sum()) if count else 0,
            "inputs": sorted(flags.inputs), "dots": sorted(flags.dots),
        }  # fmt: skip

    def hand_out(self, spec: Any) -> None:
        """Remember the storage of a result: a later call must not return it once more while somebody may hold it."""
        view = self.heap.view(spec)
        view.storage.returned = bool(view.numel) and not view.storage.argument
        self.ledger.results.add(view.storage.serial)

    def facts(self) -> dict[str, Any]:
        """What the launches of this call did."""
        rows, (between, buffers) = self.meter.per_launch, self.ledger.between
        return {
            "launches": len(rows),
            "loaded": self.meter.loaded_bytes, "stored": self.meter.stored_bytes, "atomic": self.meter.atomic_bytes,
            "sectors": sum(r.loaded_sector_bytes + r.stored_sector_bytes for r in rows),
            "reread": sum(r.reread_bytes for r in rows),
            "dots": sorted(self.meter.dot_kinds), "flops": dict(self.meter.flops),
            "findings": [asdict(f) | {"text": f.text()} for f in self.sanitizer.findings],
            "kernels": by_kernel(rows), "between": between, "buffers": buffers,
            "operands": sorted(self.ledger.operands),
        }  # fmt: skip

    # -- steps -------------------------------------------------------------------------------------
    def _alloc(self, base: Any, size: Any) -> None:
        self.heap.allocate(base, size)

    def _free(self, base: Any) -> None:
        self.heap.free(base)

    def _fill(self, spec: Any, value: Any) -> None:
        view = self.heap.view(spec)
        if type(value) not in (bool, int, float):
            raise TraceError("fill value")
        self._brought(8)
        if view.numel and ((self.moves and not view.dense) or (self.picks and not self._whole(spec, view))):
            raise ComputedByHost("torch fills a part of a tensor, where putting values into their places is the task")
        if view.numel:
            try:
                view.values().fill_(value)
            except (RuntimeError, OverflowError) as e:
                raise LaunchRefused(f"cannot fill with {value!r}: {e}"[:200]) from e
            view.mark(view.storage.initialised, True)
            view.mark(view.storage.stored, False)
            view.mark(view.storage.origin, MOVED if view.storage.argument and view.storage.inputs else CONSTANT)
            view.storage.kinds.add(kind(view.dtype))

    def _whole(self, spec: Any, view: View) -> bool:
        """Whether a view holds every element of its tensor, once."""
        every = view.numel * view.dtype.itemsize == view.storage.data.size or any(
            given[0] == spec[0] and math.prod(n for n, _ in given[3]) == view.numel for given in self._given
        )
        return every and view.apart

    def _pads(self, target: Any, to: View, source: Any, of: View) -> bool:
        """Whether whole data is copied to a whole tensor, or into one that holds no data yet: a frame around it."""
        whole = self._whole(target, to) or (bool(of.storage.inputs) and not to.storage.inputs)
        return whole and (self._whole(source, of) or not (of.storage.inputs or to.storage.inputs))

    def _brought(self, size: int) -> None:
        """Count what the host brings in; without a bound it could bring the whole result.

        Raises:
            ComputedByHost: more than ``HOST_BYTES``.
        """
        self.host_bytes += size
        if self.host_bytes > HOST_BYTES:
            raise ComputedByHost(
                f"more than {HOST_BYTES} bytes of constants brought by the host in one call", "host_traffic"
            )

    def _copy(self, target: Any, source: Any) -> None:
        to, of = self.heap.view(target), self.heap.view(source)
        if not may_copy(of.dtype, to.dtype) and not self.torch_ops:
            raise ComputedByHost(f"a copy from {_name(of.dtype)} to {_name(to.dtype)} computes")
        if not to.numel:
            return
        if of.dtype is not to.dtype and not self.torch_ops and not of.storage.kinds <= {kind(of.dtype)}:
            # Sign bits become masks, carries become sums: a conversion of reinterpreted bytes can compute anything.
            raise ComputedByHost(
                f"a conversion to {_name(to.dtype)} of bytes that were not written as {_name(of.dtype)}"
            )
        plain = (of.dense or _order(source) in self._given) and (to.dense or _order(target) in self._given)
        if self.moves and not plain:
            raise ComputedByHost("torch copies a part of a tensor or in another order, where moving values is the task")
        if self.picks and not self._pads(target, to, source, of):
            raise ComputedByHost("torch copies a part of a tensor, where picking parts is the task")
        try:
            plain = plain and of.shape == to.shape
            values = of.values().expand(to.shape)
            initialised = of.flags(of.storage.initialised).expand(to.shape).clone()
            stored = of.flags(of.storage.stored).expand(to.shape).clone()
            origin = of.flags(of.storage.origin).expand(to.shape).clone()
            to.values().copy_(values)
        except RuntimeError as e:
            raise TraceError("copy between shapes that do not fit") from e
        to.mark(to.storage.initialised, initialised)
        to.mark(to.storage.stored, stored)
        if not plain:
            origin[origin != CONSTANT] = MOVED
        to.mark(to.storage.origin, origin)
        to.storage.kinds.add(kind(to.dtype))
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
        self._brought(len(data))
        if data:
            values = torch.frombuffer(bytearray(data), dtype=view.dtype).view(view.shape)
            view.values().copy_(values)
            view.mark(view.storage.initialised, True)
            view.mark(view.storage.stored, False)
            view.mark(view.storage.origin, MOVED)
            view.storage.kinds.add(kind(view.dtype))

    def _torch(self, name: Any, overload: Any, args: Any, kwargs: Any, outs: Any) -> None:
        if not self.torch_ops:
            raise ComputedByHost(f"torch operation {str(name)[:40]} computes")
        try:
            torch_ops.run(self.heap.view, name, overload, args, kwargs, outs)
        except torch_ops.NotRecordable as e:
            raise ttir.Unsupported(str(e)) from e

    def _launch(self, key: Any, grid: Any, args: Any, names: Any) -> None:
        module = self.kernels.get(key) if isinstance(key, str) else None
        if module is None or not isinstance(grid, list) or len(grid) != 3 or not isinstance(args, list):
            raise TraceError("malformed launch")
        x, y, z = (whole(n, "grid", 1 << 63) for n in grid)
        size = (x, y, z)
        if any(n > top for n, top in zip(size, GRID, strict=True)):
            raise LaunchRefused(f"{module.entry.name}: grid {size}; a device launches at most {GRID}")
        if 0 in size or self.ablate:
            return
        values = [argument(a) for a in args]
        for k, (v, t) in enumerate(zip(values, module.entry.body.blocks[0].arg_types, strict=False)):
            # Sizes and strides repeat; what is new in every launch may be data.
            if t.elem not in ("ptr", "desc") and (key, k, v) not in self._arguments:
                self._arguments.add((key, k, v))
                self._brought(t.dtype.itemsize)
        told = [str(n)[:60] for n in names] if isinstance(names, list) else []
        regions = [
            # With the flags also where all are set: a launch that copies unwritten memory clears them.
            ttir.Region(s.base, s.data, "", s.initialised, stored=s.stored)
            for s in self.heap
        ]
        fits(module, values)
        try:
            ttir.launch(
                module, size, values, regions, self.meter, deadline=self.deadline, names=told,
                sanitizer=self.sanitizer if self.perturbation is None else None, perturbation=self.perturbation,
            )  # fmt: skip
        except (ttir.OutOfBounds, ttir.DeviceAssert, ttir.Deadlock, ttir.DecidesOnUnwritten, TimeoutError, MemoryError):
            raise
        except Exception:
            genuine(self.texts[key])
            raise
        self.ledger.moved(self.heap, values, self.meter.per_launch[-1])
        self._trace(module, values)

    def _trace(self, module: ttir.Module, values: Sequence[Any]) -> None:
        """Carry along which inputs and products reached which storage."""
        everything = list(self.heap)

        def held(arguments: frozenset[int]) -> list[Storage]:
            found = []
            for k in arguments:
                s = self.heap.at(address(values[k]))
                if s is not None:
                    found.append(s)
            return found

        types = module.entry.body.blocks[0].arg_types
        if ttir.unknown_access(module):  # what kind of number went where cannot be said
            for s in everything:
                s.kinds |= set() if s.argument else {"?"}
        for k in sorted(set().union(*(s.target_args for s in ttir.store_slices(module)))):
            pointee = types[k].pointee if 0 <= k < len(types) else None
            for t in held(frozenset([k])) if k >= 0 else ():
                t.kinds.add(pointee.elem if pointee is not None and pointee.elem != "ptr" else "?")
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
        self.ledger.depends(module, held)


def _order(spec: Any) -> Any:
    """A view without what does not change the order of its elements: axes of length one, and repetition."""
    return [*spec[:3], [(n, s) for n, s in zip(spec[3], spec[4], strict=True) if n > 1 and s]]


def _name(dtype: torch.dtype) -> str:
    return next((k for k, v in DTYPES.items() if v is dtype), str(dtype))
