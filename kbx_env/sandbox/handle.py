"""The result of ``kernel.warmup()`` and ``kernel[grid]()``: a compiled kernel that knows its resources and can be launched.

Host code sizes persistent grids by the registers and the shared memory of a kernel, and then launches the same object.
On the CPU tier that object is a stand-in whose numbers come from the compiler; on CUDA it is Triton's own. Its launch is
treated as any other: counted, recorded, and left out where launches are left out.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel
from triton.runtime.errors import OutOfResources

from kbx_env.backends.cost.cubin import Resources, resources
from kbx_env.sandbox.fake_cuda.driver import SHARED_LIMIT

_REGISTERS, _THREADS = 65536, 1024


class Specialised(Protocol):
    """A kernel compiled for certain types and constants of its arguments."""

    fn: Any
    signature: dict[str, Any]
    constexprs: dict[Any, Any]
    attrs: dict[Any, Any]
    options: Any


def size_of(grid: Sequence[int]) -> tuple[int, int, int]:
    """Return the grid of a compiled kernel, which must have three numbers: none is filled in."""
    return int(grid[0]), int(grid[1]), int(grid[2])


class Handle:
    """The stand-in for a compiled kernel.

    Args:
        compiled: the specialised kernel.
        target: the GPU that it is compiled for, on the first use of the result.
        launch: takes a grid and all arguments by name, and launches the kernel.
    """

    def __init__(
        self,
        compiled: Specialised,
        target: GPUTarget,
        launch: Callable[[tuple[int, int, int], Mapping[str, Any]], None],
    ) -> None:
        self._compiled, self._target, self._launch = compiled, target, launch
        self.module = self.function = None

    @functools.cached_property
    def _kernel(self) -> CompiledKernel:
        c = self._compiled
        source = ASTSource(c.fn, c.signature, c.constexprs, c.attrs)
        return triton.compile(source, target=self._target, options=c.options.__dict__)

    @functools.cached_property
    def _used(self) -> Resources:
        return resources(self._kernel.asm["cubin"])

    @property
    def n_regs(self) -> int:
        """Registers per thread, of 32 bits."""
        return self._used.registers

    @property
    def n_spills(self) -> int:
        """Words of local memory per thread, of 32 bits."""
        return self._used.local_bytes // 4

    @property
    def n_max_threads(self) -> int:
        """Largest number of threads of one block."""
        return min(_THREADS, _REGISTERS // max(1, self.n_regs))

    def _init_handles(self) -> None:
        limit = SHARED_LIMIT[f"sm_{self._target.arch}"]
        if self._kernel.metadata.shared > limit:
            raise OutOfResources(self._kernel.metadata.shared, limit, "shared memory")

    def __getattr__(self, name: str) -> Any:
        # Metadata and the texts of each compilation stage.
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._kernel, name)

    def __getitem__(self, grid: Sequence[int]) -> Callable[..., None]:
        def launch(*args: Any, stream: Any = None) -> None:
            names = list(self._compiled.signature)
            if len(args) != len(names):
                raise TypeError(
                    f"a compiled kernel takes all its {len(names)} arguments by position, {len(args)} given"
                )
            self._launch(size_of(grid), dict(zip(names, args, strict=True)))

        return launch


def watch(launched: Callable[[CompiledKernel], bool]) -> None:
    """Replace ``CompiledKernel.__getitem__`` to watch launches of Triton's own compiled kernels (CUDA).

    Args:
        launched: called with the kernel before each launch; the launch happens if it returns true.
    """
    plain = CompiledKernel.__getitem__

    def item(kernel: CompiledKernel, grid: Any) -> Callable[..., Any]:
        go = plain(kernel, grid)

        def launch(*args: Any, **kwargs: Any) -> Any:
            return go(*args, **kwargs) if launched(kernel) else None

        return launch

    CompiledKernel.__getitem__ = item  # type: ignore[method-assign]
