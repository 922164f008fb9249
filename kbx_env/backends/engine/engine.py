"""Executes a trace: the host's allocations, fills and copies, and every kernel launch, on memory of its own.

A submission's process never sees an input's values (except scalars that it reads back) and never holds a result. It
sends the steps of its host code, and only these steps exist: allocate, fill with one value, copy between equal kinds of
numbers, launch a Triton kernel. Every value in an output was therefore produced by them, and the engine observes them
itself: provenance, traffic, launches and matrix products are facts, not claims.
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
from kbx_env.backends.engine.checks import check_arguments, decode_argument, require_triton_ir
from kbx_env.backends.engine.conversions import argument_to_float, may_copy, passed_on, unmodified
from kbx_env.backends.engine.counters import CallCounters, base_address, rows_by_kernel
from kbx_env.backends.engine.storage import (
    CONSTANT,
    DTYPES,
    INPUT,
    MOVED,
    Heap,
    Storage,
    TraceError,
    View,
    bounded_int,
    kind,
    unit_bytes,
)
from kbx_env.backends.engine.symbols import require_known_symbols

MAX_TEXT = 8 << 20
"""Largest length of a kernel's text, in characters."""
MAX_KERNELS = 512
"""Largest number of kernels of a submission."""
MAX_NAME = 200
"""Largest length of a kernel's name, in characters."""
MAX_TENSOR = 1 << 20
"""Largest number of elements of one tensor in a kernel, which is also Triton's own limit."""
GRID = (2**31 - 1, 65535, 65535)
"""Largest grid of a CUDA device."""
STRAY = 2 << 20
"""Bytes by which an access may miss a tensor unseen in the paper's check: torch's allocator takes memory in such segments."""
HOST_BYTES = 16 << 10
"""Largest number of bytes of constants, fill values and scalar launch arguments of the host code in a call."""
ASSEMBLED_BYTES = 1 << 30
"""Largest sum of the sizes of the copies that ``Engine`` keeps of what torch has put together in a call."""
ASSEMBLED_ELEMENTS = 16
"""Results with fewer elements may agree with what torch has put together by chance."""
LENGTHS = {"alloc": 2, "free": 1, "fill": 2, "copy": 2, "host": 2, "launch": 4, "torch": 5}
"""Number of parts of a step after its name."""


class ComputedByHost(Exception):
    """A step would be a computation by the host.

    That is a copy between kinds of numbers, a copy that moves values where moving is the task, or more constants than
    sizes and seeds need.

    Args:
        message: The text for the author of the submission.
        name: The rule that was broken.
    """

    def __init__(self, message: str, name: str = "torch_compute") -> None:
        super().__init__(message)
        self.name = name


class LaunchRefused(Exception):
    """A launch or fill that a device would refuse."""


class Engine:
    """The memory and the launches of one submission.

    Attributes:
        heap: Its storages.
        kernels: Parsed kernels by key.
        texts: Their TTIR.
        deadline: Value of ``time.process_time`` at which the call must end.
        perturbation: Integers to replace in launches, if any.
        order: Order of the programs of a launch, as ``ttir.launch`` takes it.
        meter: Counters of the call's launches.
        counters: Further counters of the call.
        sanitizer: Findings of the call.
        host_bytes: Bytes of constants that the host code brought into the call so far.
    """

    def __init__(self) -> None:
        self.heap = Heap()
        self.kernels: dict[str, ttir.Module] = {}
        self.texts: dict[str, str] = {}
        self.deadline = math.inf
        self.perturbation: ttir.Perturbation | None = None
        self.order = ""
        self.begin(math.inf)
        self._steps: Mapping[str, Callable[..., None]] = {
            "alloc": self._alloc, "free": self._free, "fill": self._fill, "copy": self._copy, "host": self._host,
            "launch": self._launch, "torch": self._torch,
        }  # fmt: skip

    def begin(
        self, seconds: float, moves: bool = False, picks: bool = False, torch_ops: bool = False, ablate: bool = False,
        values: bool = False, detail: bool = True,
    ) -> None:  # fmt: skip
        """Start a call: reset the counters. The memory stays, but counts as neither stored by this call nor made of its inputs.

        Args:
            seconds: Limit of CPU time of the call.
            moves: The task only moves values, so that torch must not move any.
            picks: The task picks or fills parts of tensors, so that torch must not.
            torch_ops: The host code may compute in torch.
            ablate: Skip every launch.
            values: The host code may bring in any number of constants, and faults that a GPU does not show end nothing (the
                paper's check).
            detail: Count sectors and repeated reads. Calls of which nobody asks for them take less time without.
        """
        self.deadline = time.process_time() + seconds
        self.moves, self.picks, self.torch_ops, self.ablate, self.host_bytes = moves, picks, torch_ops, ablate, 0
        self.values = values
        self._counted_scalars: set[tuple[str, int, Any]] = set()
        self._input_views: list[Any] = []
        self._assembled: list[tuple[int, bytes]] = []
        self._assembled_bytes = 0
        for s in self.heap:
            s.assembled = 0, 0, 0
            s.stored[:] = False
            s.begin_call()
            s.passed = None
            # Memory that outlives a call holds nothing of this call's inputs: a kept result depends on none of them.
            s.inputs, s.dots = set(), set()
        self.meter, self.counters = ttir.Meter(detail=detail), CallCounters()
        self.sanitizer = ttir.Sanitizer()

    # -- commands of the grader --------------------------------------------------------------------
    def input(self, name: str, base: Any, size: int, offset: int, data: bytes | bytearray, spec: Any) -> None:
        """Add an argument of the call.

        Args:
            name: Its name; "" for an ``out=`` argument, whose values are no input.
            base: Address of its storage, as the host code sees it.
            size: Bytes of the storage.
            offset: Where ``data`` begins in the storage, in bytes.
            data: Its values.
            spec: The view of it, as ``Heap.view`` takes it.

        Raises:
            TraceError: there is no room for the storage.
        """
        storage = self.heap.allocate(base, size)
        storage.argument = True
        self._input_views.append(_element_order(spec))
        storage.data[offset : offset + len(data)] = np.frombuffer(data, np.uint8)
        if name:
            storage.initialised[:] = True
            storage.origin[:] = INPUT
            storage.inputs.add(name)
            storage.kinds.add(kind(DTYPES[spec[1]]))
            if not (DTYPES[spec[1]].is_floating_point or DTYPES[spec[1]].is_complex):
                storage.passed = DTYPES[spec[1]]

    def kernel(self, key: str, text: Any, fused: Any) -> None:
        """Add a compiled kernel.

        Args:
            key: Names it in launches.
            text: Its TTIR.
            fused: The launch option ``enable_fp_fusion``.

        Raises:
            TraceError: Triton refuses the text, or it exceeds a limit.
            UnknownSymbol: no device could link the kernel.
            Unsupported: the executor does not implement something in the text.
        """
        if not isinstance(text, str) or len(text) > MAX_TEXT or len(self.kernels) >= MAX_KERNELS:
            raise TraceError("too much kernel text")
        if key in self.kernels:  # the recorder sends each text once; another one under its key would be compared in its place
            raise TraceError("a kernel was sent twice")
        try:
            module = ttir.parse(text, fp_fusion=fused is not False)
        except MemoryError:
            raise
        except Exception as e:
            require_triton_ir(text)
            if isinstance(e, ttir.Unsupported):
                raise
            raise ttir.Unsupported("text", detail=f"{type(e).__name__}: {e}"[:200]) from e
        if len(module.entry.name) > MAX_NAME:
            raise TraceError("a kernel's name is too long")
        if module.max_elements > MAX_TENSOR:
            raise TraceError(f"a tensor of {module.max_elements} elements")
        require_known_symbols(module)
        self.kernels[key], self.texts[key] = module, text

    def run(self, steps: Any) -> None:
        """Execute steps in order.

        Args:
            steps: A list of lists: the step's name and its ``LENGTHS`` parts.

        Raises:
            TraceError: a step makes no sense.
            ComputedByHost: a step would compute.
            LaunchRefused: a device would refuse a launch.
            TtirError: from a launch.
            TimeoutError: the call took too long.
            MemoryError: the host has no memory left.
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
            except NotImplementedError as e:  # torch does not implement it for a dtype
                raise ttir.Unsupported(step[0], detail=str(e)[:200]) from e
            except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as e:
                if step[0] == "launch":  # its arguments were checked: a fault of the executor
                    raise
                if "allocate memory" in str(e):
                    raise MemoryError from e
                raise TraceError(f"step {step[0]}: {e}"[:300]) from e
            if time.process_time() > self.deadline:
                raise TimeoutError("the call took too long")

    def read(self, spec: Any, *, by_host: bool = False) -> tuple[View, bytes]:
        """Read a view.

        Args:
            spec: The view, as ``Heap.view`` takes it.
            by_host: The host code wants the values: unwritten ones become a finding.

        Returns:
            The view, and its elements, dense in row-major order.

        Raises:
            TraceError: the view makes no sense.
        """
        view = self.heap.view(spec)
        if by_host and view.count_set(view.storage.initialised) < view.numel:
            found = ttir.Finding("uninitialised_read", "", 0, "", (0, 0, 0), "", 0, access="host", indirect=True)
            self.sanitizer.report(found)
        dense = view.values().contiguous()
        # A single element counts as contiguous whatever its strides, and only a stride of 1 can be read as bytes.
        flat = dense.as_strided((dense.numel(),), (1,))
        return view, (flat.view(torch.uint8).numpy().tobytes() if dense.numel() else b"")

    def origin(self, view: View) -> dict[str, Any]:
        """Return the origin of a view's values.

        Args:
            view: The view.

        Returns:
            The numbers of elements (all, ``stored`` by kernels, ``moved`` by the host, ``unwritten``), whether an
            earlier call returned the storage (``again``), whether torch's copies alone had made these values before a
            launch (``assembled``), the bytes of one written number (``unit``), and the inputs and kinds of products
            that the values may depend on.
        """
        count = view.numel
        flags = view.storage
        by_kernels = view.count_set(flags.stored)
        moved = 0
        if by_kernels < count:
            moved = int(((view.flags(flags.origin) == MOVED) & ~view.flags(flags.stored)).count_nonzero())
        return {
            "elements": count,
            "stored": by_kernels,
            "moved": moved,
            "again": flags.returned and bool(count),
            "assembled": self._was_assembled(view),
            "unit": unit_bytes(flags.kinds),
            "unwritten": count - view.count_set(flags.initialised),
            "inputs": sorted(flags.inputs), "dots": sorted(flags.dots),
        }  # fmt: skip

    def _keep_assembled(self) -> None:
        """Keep what torch has put together from parts of inputs, before a launch can overwrite it or copy it."""
        for s in self.heap:
            copies, first, end = s.assembled
            if copies:
                s.assembled = 0, 0, 0
                self._assembled_bytes += end - first
                if self._assembled_bytes > ASSEMBLED_BYTES:
                    raise MemoryError
                self._assembled.append((copies, s.data[first:end].tobytes()))

    def _was_assembled(self, view: View) -> bool:
        """Return whether torch's copies had made the values of a result before a kernel stored them.

        A kernel that only copies a finished result has done no work. The bytes are compared and not the code, so that adding 0
        or multiplying by 1 changes nothing. One copy may move more than the result, such as a whole matrix of which a kernel then
        picks a row.
        """
        if view.numel < ASSEMBLED_ELEMENTS or not self._assembled:
            return False
        data = view.values().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        return any((copies > 1 or len(made) <= 2 * len(data)) and data in made for copies, made in self._assembled)

    def mark_returned(self, spec: Any) -> None:
        """Mark a result's storage as returned: a later call must not return it, as the caller may still use it."""
        view = self.heap.view(spec)
        view.storage.returned = bool(view.numel) and not view.storage.argument
        self.counters.results.add(view.storage.serial)

    def facts(self) -> dict[str, Any]:
        """Return the counters and findings of this call's launches."""
        rows, (between, buffers) = self.meter.per_launch, self.counters.between
        return {
            "launches": len(rows),
            "loaded": self.meter.loaded_bytes, "stored": self.meter.stored_bytes, "atomic": self.meter.atomic_bytes,
            "sectors": sum(r.loaded_sector_bytes + r.stored_sector_bytes for r in rows),
            "reread": sum(r.reread_bytes for r in rows),
            "dots": sorted(self.meter.dot_kinds), "flops": dict(self.meter.flops),
            "findings": [asdict(f) | {"text": f.text()} for f in self.sanitizer.findings],
            "kernels": rows_by_kernel(rows), "between": between, "buffers": buffers,
            "operands": sorted(self.counters.operands),
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
        self._count_host_bytes(8)
        if view.numel and ((self.moves and not view.dense) or (self.picks and not self._covers(spec, view))):
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
            view.storage.passed = None

    def _covers(self, spec: Any, view: View) -> bool:
        """Return whether a view contains every element of its tensor, once."""
        return view.distinct and self._has_all(spec, view, view.numel)

    def _has_all(self, spec: Any, view: View, elements: int) -> bool:
        """Return whether so many different elements are all of a view's tensor."""
        return elements * view.dtype.itemsize == view.storage.data.size or any(
            known[0] == spec[0] and math.prod(n for n, _ in known[3]) == elements for known in self._input_views
        )

    def _repeats(self, spec: Any, view: View) -> bool:
        """Return whether a view is a whole tensor, broadcast to more axes or along axes of length 1."""
        own = [(n, s) for n, s in zip(view.shape, view.stride, strict=True) if s]
        once = View(view.storage, view.dtype, view.offset, tuple(n for n, _ in own), tuple(s for _, s in own))
        return once.distinct and self._has_all(spec, view, once.numel)

    def _pads(self, target: Any, to: View, source: Any, of: View) -> bool:
        """Return whether a whole tensor is copied to a whole tensor, or into part of one without data yet (padding)."""
        all_written = self._covers(target, to) or (bool(of.storage.inputs) and not to.storage.inputs)
        return all_written and (self._repeats(source, of) or not (of.storage.inputs or to.storage.inputs))

    def _count_host_bytes(self, size: int) -> None:
        """Count constants of the host code; without a bound they could contain the whole result.

        Args:
            size: Bytes of the constant.

        Raises:
            ComputedByHost: there are more than ``HOST_BYTES``.
        """
        self.host_bytes += size
        if self.host_bytes > HOST_BYTES and not self.values:
            raise ComputedByHost(
                f"more than {HOST_BYTES} bytes of constants brought by the host in one call", "host_traffic"
            )

    def _copy(self, target: Any, source: Any) -> None:
        to, of = self.heap.view(target), self.heap.view(source)
        converts_argument = False
        if not may_copy(of.dtype, to.dtype) and not self.torch_ops:
            converts_argument = argument_to_float(of.dtype, to.dtype) and not (self.moves or self.picks)
            if not converts_argument or (to.numel and not unmodified(of)):
                only = "; of integers torch may convert an unmodified argument only" if converts_argument else ""
                raise ComputedByHost(f"a copy from {_name(of.dtype)} to {_name(to.dtype)} computes{only}")
        if not to.numel:
            return
        if of.dtype is not to.dtype and not self.torch_ops and not of.storage.kinds <= {kind(of.dtype)}:
            # A conversion of reinterpreted bytes can compute: sign bits become masks, carries become sums.
            raise ComputedByHost(
                f"a conversion to {_name(to.dtype)} of bytes that were not written as {_name(of.dtype)}"
            )
        plain = (of.dense or _element_order(source) in self._input_views) and (
            to.dense or _element_order(target) in self._input_views
        )
        if self.moves and not plain:
            raise ComputedByHost("torch copies a part of a tensor or in another order, where moving values is the task")
        if self.picks and not self._pads(target, to, source, of):
            raise ComputedByHost("torch copies a part of a tensor, where picking parts is the task")
        # The values of a converted argument are those of torch: a result that holds them was not stored by a kernel.
        plain, passed = plain and not converts_argument, passed_on(of, to)
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
        to.mark(to.storage.origin, origin if plain else torch.where(origin != CONSTANT, MOVED, origin))
        if not plain and of.storage.inputs:
            copies, first, end = to.storage.assembled
            first = min(first, to.offset) if copies else to.offset
            to.storage.assembled = copies + 1, first, max(end, to.end)
        to.storage.kinds.add(kind(to.dtype))
        to.storage.passed = passed
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
        self._count_host_bytes(len(data))
        if data:
            values = torch.frombuffer(bytearray(data), dtype=view.dtype).view(view.shape)
            view.values().copy_(values)
            view.mark(view.storage.initialised, True)
            view.mark(view.storage.stored, False)
            view.mark(view.storage.origin, MOVED)
            view.storage.kinds.add(kind(view.dtype))
            view.storage.passed = None

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
        x, y, z = (bounded_int(n, "grid", 1 << 63) for n in grid)
        size = (x, y, z)
        if any(n > top for n, top in zip(size, GRID, strict=True)):
            raise LaunchRefused(f"{module.entry.name}: grid {size}; a device launches at most {GRID}")
        if 0 in size or self.ablate:
            return
        self._keep_assembled()
        values = [decode_argument(a) for a in args]
        for k, (v, t) in enumerate(zip(values, module.entry.body.blocks[0].arg_types, strict=False)):
            # Each scalar counts once per call: sizes and strides repeat, while values that change may be data.
            if t.elem not in ("ptr", "desc") and (key, k, v) not in self._counted_scalars:
                self._counted_scalars.add((key, k, v))
                self._count_host_bytes(t.dtype.itemsize)
        argument_names = [str(n)[:60] for n in names] if isinstance(names, list) else []
        regions = [
            # The masks are passed also where all bytes are written: a launch that copies unwritten memory clears them.
            ttir.Region(s.base, s.data, "", s.initialised, stored=s.stored)
            for s in self.heap
        ]
        check_arguments(module, values)
        try:
            ttir.launch(
                module, size, values, regions, self.meter, deadline=self.deadline, names=argument_names,
                sanitizer=self.sanitizer if self.perturbation is None and not self.values else None,
                perturbation=self.perturbation, stray=STRAY if self.values else 0, order=self.order,
            )  # fmt: skip
        except (ttir.OutOfBounds, ttir.DeviceAssert, ttir.Deadlock, ttir.DecidesOnUnwritten, TimeoutError, MemoryError):
            raise
        except Exception:
            require_triton_ir(self.texts[key])
            raise
        self.counters.count_traffic(self.heap, values, self.meter.per_launch[-1])
        self._trace(module, values)

    def _trace(self, module: ttir.Module, values: Sequence[Any]) -> None:
        """Update for each storage the inputs and products that its values may depend on, after a launch.

        Args:
            module: The kernel.
            values: Arguments of the launch.
        """
        everything = list(self.heap)

        def storages_of(arguments: frozenset[int]) -> list[Storage]:
            found = []
            for k in arguments:
                s = self.heap.find(base_address(values[k]))
                if s is not None:
                    found.append(s)
            return found

        types = module.entry.body.blocks[0].arg_types
        if ttir.unknown_access(module):  # any storage may contain any kind of number now
            for s in everything:
                s.kinds |= set() if s.argument else {"?"}
        for k in sorted(set().union(*(s.target_args for s in ttir.store_slices(module)))):
            pointee = types[k].pointee if 0 <= k < len(types) else None
            for t in storages_of(frozenset([k])) if k >= 0 else ():
                t.kinds.add(pointee.elem if pointee is not None and pointee.elem != "ptr" else "?")
        slices = [
            (
                storages_of(s.target_args),
                storages_of(s.value_args | s.control_args | s.address_args),
                storages_of(s.value_args),
                s.dots,
            )
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
        self.counters.count_operands(module, storages_of)


def _element_order(spec: Any) -> Any:
    """Return a view without the axes of length one or stride 0, which do not affect the order of its elements."""
    return [*spec[:3], [(n, s) for n, s in zip(spec[3], spec[4], strict=True) if n > 1 and s]]


def _name(dtype: torch.dtype) -> str:
    return next((k for k, v in DTYPES.items() if v is dtype), str(dtype))
