"""Estimates the microseconds of a trace on a named GPU from a sample of each launch's programs.

Registers and shared memory come from kernels that are compiled here, from the TTIR of the trace; claims of the
submission's process about them are not used. A trace whose host code reads back a kernel's result cannot be estimated,
because the value is unknown. Values that the host wrote itself (a seed) are known.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from kbx_env.backends import cost, ttir
from kbx_env.backends.engine.checks import decode_argument
from kbx_env.backends.engine.repeated import repeated
from kbx_env.backends.engine.storage import Heap, TraceError, View

COPY_BLOCK = 8192
"""Bytes that one program of a copy or fill is assumed to move."""
OPTIONS = ("num_warps", "num_stages", "num_ctas", "maxnreg", "enable_fp_fusion")
"""Launch options that are passed to the compiler."""


class Estimator:
    """Estimates one call on one device.

    Args:
        device: Name of the device, as ``cost.load`` takes it.
        seconds: Limit of CPU time.
        compiled: Resources and bytes of shared memory by capability and kernel; kept between the calls of a submission.
    """

    def __init__(self, device: str, seconds: float, compiled: dict[str, tuple[cost.Resources, int]]) -> None:
        self.device = cost.load(device)
        self.heap = Heap(blank=True)
        self.deadline = time.process_time() + seconds
        self.kernels: dict[str, tuple[ttir.Module, Mapping[str, Any], cost.Resources, int]] = {}
        self.compiled = compiled
        self.facts: list[cost.LaunchFacts] = []
        self._unknown: set[int] = set()

    def input(self, base: Any, size: int, offset: int, tile: bytes | bytearray) -> None:
        """Add an argument. Its values, which addresses may depend on, are those of a smaller call, repeated.

        Args:
            base: Address of its storage.
            size: Bytes of the storage.
            offset: Where the argument begins in the storage, in bytes.
            tile: The bytes to repeat; empty for zeros.
        """
        storage = self.heap.allocate(base, size)
        self._unknown.add(storage.base)
        if tile:
            before = offset % len(tile)
            storage.data = repeated(bytes(tile[-before:] + tile[:-before]) if before else tile, size)

    def kernel(self, key: str, row: Mapping[str, Any], module: ttir.Module) -> None:
        """Compile a kernel for the device.

        Args:
            key: Names it in launches.
            row: ``text``, its TTIR, and the ``options`` of its launch.
            module: The parsed text.
        """
        import triton
        from triton.backends.compiler import GPUTarget

        options = {k: v for k, v in dict(row.get("options") or {}).items() if k in OPTIONS and v is not None}
        name = f"{self.device.capability} {key}"
        if name not in self.compiled:
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "kernel.ttir"
                path.write_text(row["text"])
                triton.knobs.cache.dir = folder
                made = triton.compile(str(path), target=GPUTarget("cuda", self.device.capability, 32), options=options)
                self.compiled[name] = cost.resources(made.asm["cubin"]), int(made.metadata.shared)
        self.kernels[key] = module, options, *self.compiled[name]

    def run(self, steps: Any) -> None:
        """Count every step that a device would execute.

        Args:
            steps: As for ``Engine.run``.

        Raises:
            TraceError: a step makes no sense.
            TtirError: from a launch.
            TimeoutError: the time limit passed.
        """
        for step in steps if isinstance(steps, list) else []:
            match step:
                case ["alloc", base, size]:
                    self.heap.allocate(base, size)
                case ["free", base]:
                    self.heap.free(base)
                case ["fill", spec, _]:
                    self._move("fill", [], self.heap.view(spec))
                case ["copy", target, source]:
                    if self.heap.view(source).storage.base in self._unknown:
                        self._unknown.add(self.heap.view(target).storage.base)
                    self._move("copy", [self.heap.view(source)], self.heap.view(target))
                case ["host", spec, text]:
                    view = self.heap.view(spec)
                    values = torch.frombuffer(bytearray.fromhex(text), dtype=view.dtype)
                    view.values().copy_(values.view(view.shape))
                case ["launch", str(key), list(grid), list(args), *_] if key in self.kernels and len(grid) == 3:
                    self._launch(key, (grid[0], grid[1], grid[2]), [decode_argument(a) for a in args])
                case _:
                    raise TraceError(f"step {str(step)[:40]!r}")

    def _move(self, name: str, sources: Sequence[View], target: View) -> None:
        """Count a fill or a copy as a launch of torch's own kernel."""
        if not target.numel:
            return
        stored = target.numel * target.dtype.itemsize
        loaded = sum(v.numel * v.dtype.itemsize for v in sources)
        self.facts.append(cost.LaunchFacts(
            kernel=name, programs=-(-stored // COPY_BLOCK), num_warps=4, registers=32,
            loaded_bytes=loaded, stored_bytes=stored, unique_loaded=loaded, unique_stored=stored,
            loaded_sectors=loaded / 32, stored_sectors=stored / 32, load_rounds=1 if sources else 0,
        ))  # fmt: skip

    def _launch(self, key: str, grid: tuple[int, int, int], args: list[Any]) -> None:
        module, options, used, shared = self.kernels[key]
        programs = grid[0] * grid[1] * grid[2]
        if programs <= 0:
            return
        self._unknown.update(s.base for a in args if isinstance(a, int) and (s := self.heap.find(a)) is not None)
        if any(isinstance(a, ttir.Descriptor) for a in args):
            raise ttir.Unsupported("estimates of descriptors made by the host")
        regions = [ttir.Region(s.base, s.data, f"{s.base}") for s in self.heap]
        stages = int(options.get("num_stages", 1))
        counts = cost.count(module, grid, args, regions, num_stages=stages, deadline=self.deadline)
        self.facts.append(cost.facts(
            counts, kernel=module.entry.name, programs=programs, num_warps=int(options.get("num_warps", 4)),
            num_stages=stages, registers=used.registers, shared_bytes=shared, local_bytes=used.local_bytes,
        ))  # fmt: skip

    def host_values(self, spec: Any) -> list[Any]:
        """Return values that the host code reads back.

        Args:
            spec: A view, as ``Heap.view`` takes it.

        Returns:
            The elements in row-major order.

        Raises:
            Unsupported: they come from an input or a kernel.
        """
        view = self.heap.view(spec)
        if view.storage.base in self._unknown:
            raise ttir.Unsupported("estimates of calls that read a result back")
        found: list[Any] = view.values().reshape(-1).tolist()
        return found

    def result(self) -> dict[str, Any]:
        """Estimate all steps so far.

        Returns:
            ``estimated_us``, ``bound_by``, the number of ``launches``, the ``parts`` in microseconds, and the origin of
            the ``constants``.

        Raises:
            UsageError: a program does not fit on a multiprocessor.
        """
        found = cost.estimate_us(self.facts, self.device)
        return {
            "estimated_us": found.estimated_us, "bound_by": found.bound_by, "launches": len(self.facts),
            "parts": found.parts, "constants": self.device.sources.get("constants", ""),
        }  # fmt: skip
