"""Intercepts every Triton launch of a submission: compiles it ahead of time, and passes it on or leaves it out.

``JITFunction.run`` is replaced. On the CPU tier a stand-in driver with a target replaces the GPU: the launch is
specialised exactly as on the device and compiled to TTIR, and the recorder passes the TTIR to the engine, which executes
it. On CUDA the launch goes through unchanged, but is recorded.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import re
import tempfile
import time
from collections.abc import Callable, Mapping
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler.compiler import make_backend
from triton.runtime import build
from triton.runtime._async_compile import FutureKernel
from triton.runtime.autotuner import Autotuner
from triton.runtime.jit import JITFunction, compute_cache_key

from kbx_env.backends.cost.cubin import resources
from kbx_env.sandbox.compile_ahead import CompileAhead, Pending
from kbx_env.sandbox.compile_errors import described
from kbx_env.sandbox.fake_cuda.driver import SHARED_LIMIT, TARGETS, StandInDriver
from kbx_env.sandbox.handle import Handle, watch
from kbx_env.sandbox.recipe import evaluated, recipe
from kbx_env.sandbox.recorder import Recorder
from kbx_env.sandbox.specialised import kernel_row, ttir_of


@dataclasses.dataclass
class Launch:
    """One launch as recorded: the kernel's name, its grid (zeros on CUDA) and its warps (0 on CUDA)."""

    kernel: str
    grid: tuple[int, int, int]
    num_warps: int


@dataclasses.dataclass
class _Compiled:
    fn: JITFunction
    signature: dict[str, str]
    constexprs: dict[Any, Any]
    attrs: dict[Any, Any]
    options: Any
    launch_options: dict[str, Any]
    key: str = ""
    described: str = ""
    text: dict[str, Any] = dataclasses.field(default_factory=dict)
    ttir: str = ""
    dots: frozenset[str] = frozenset()


class NotRebuilt(Exception):
    """A kernel compiles in the submission's process, but not from the source text alone."""

    def __init__(self, why: str) -> None:
        super().__init__(
            f"the kernel cannot be compiled from the source text alone: {why}. Kernels may use functions and classes of the "
            "source, Triton, and constants (numbers, texts, dtypes, tuples)"
        )


class Interceptor:
    """The replacement of ``JITFunction.run`` in this process.

    Args:
        device: ``cpu`` passes the TTIR to the recorder; ``cuda`` lets the launch through.
        recorder: takes the launches of the CPU tier.
        target: the GPU that the CPU tier specialises for, a key of ``TARGETS``.

    Attributes:
        mode: ``run``; ``ablate`` to leave launches out; ``time`` and ``dry`` are the same without a record.
        launches: the launches of the current call.
        kernels: the kernels seen so far, by name.
        built: pairs of kernel and target that ``build`` has compiled.
        elsewhere: compiles a description (``sandbox.recipe``) in another process, and returns the kernel's ``key`` and ``text`` or
            an ``error``; ``None`` to compile here.
        ahead: compiles in threads what is launched where launches are left out (CUDA).
        compiling_now: name and description of the specialisation that the compiler works on or has failed at; "" for none.
    """

    def __init__(self, device: str, recorder: Recorder | None = None, target: str = "sm_90") -> None:
        self.device, self.recorder, self.target = device, recorder, target
        self.mode = "run"
        self.launches: list[Launch] = []
        self.kernels: dict[str, _Compiled] = {}
        self.built: set[tuple[str, str]] = set()
        self.compiling_now = ("", "")
        self.ahead = CompileAhead()
        self.elsewhere: Callable[[dict[str, Any]], Mapping[str, Any]] | None = None
        self._cache: dict[tuple[int, str], _Compiled] = {}
        self._original = JITFunction.run
        if device == "cpu":
            triton.runtime.driver.set_active(StandInDriver(TARGETS[target]))

    def install(self) -> None:
        """Replace ``JITFunction.run`` and keep autotuners from measuring while launches are left out."""
        interceptor = self

        def run(fn: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
            return interceptor._run(fn, args, grid, warmup, kwargs)

        JITFunction.run = run  # type: ignore[method-assign]
        tune = Autotuner.run

        def autotune(tuner: Autotuner, *args: Any, **kwargs: Any) -> Any:
            if not interceptor.leaves_out:
                return tune(tuner, *args, **kwargs)
            # Launches are left out now, so the autotuner must not cache timings of them, in memory or in Triton's cache.
            kept, bench, caches = dict(tuner.cache), tuner._do_bench, getattr(tuner, "cache_results", False)
            # Each configuration is called once and so compiled: later measurements need not wait for that.
            tuner._do_bench = lambda call, quantiles=None, **k: [1.0, 1.0, 1.0] if call() is None else [1.0, 1.0, 1.0]
            tuner.cache_results = False
            tuner.__dict__.pop("do_bench", None)
            try:
                return tune(tuner, *args, **kwargs)
            finally:
                tuner.cache, tuner._do_bench, tuner.cache_results = kept, bench, caches
                tuner.__dict__.pop("do_bench", None)

        Autotuner.run = autotune  # type: ignore[method-assign]
        if interceptor.device == "cuda":
            watch(interceptor._again)

    @property
    def leaves_out(self) -> bool:
        """Whether launches are left out now."""
        return self.mode in ("ablate", "dry")

    @property
    def records(self) -> bool:
        """Whether kernels and launches are recorded now: timed calls are not."""
        return self.mode not in ("time", "dry")

    def reset(self, mode: str) -> None:
        """Start a new call in a mode: forget the launches."""
        self.mode, self.launches = mode, []

    def _run(self, fn: JITFunction, args: tuple[Any, ...], grid: Any, warmup: bool, kwargs: dict[str, Any]) -> Any:
        if self.device == "cuda":
            return self._run_cuda(fn, args, grid, warmup, kwargs)
        for hook in fn.pre_run_hooks:
            hook(*args, **kwargs)
        launch_options = dict(kwargs)
        kwargs.setdefault("debug", fn.debug)
        if hasattr(triton.knobs.compilation, "instrumentation_mode"):
            kwargs.setdefault("instrumentation_mode", triton.knobs.compilation.instrumentation_mode)
        _, key_cache, target, backend, binder = fn.device_caches[0]
        bound, specialization, options = binder(*args, **kwargs)
        key = compute_cache_key(key_cache, specialization, options)
        compiled = self._cache.get((id(fn), key))
        if compiled is None:
            opts, signature, constexprs, attrs = fn._pack_args(backend, kwargs, bound, specialization, options)
            compiled = _Compiled(fn, signature, constexprs, attrs, opts, _build_options(launch_options, fn))
            compiled.described = _described(compiled)
            self.compiling_now = fn.__name__, compiled.described
            row = self._row(compiled, backend, target)
            compiled.key, compiled.ttir = row.pop("key"), row["text"]
            compiled.text = row if "fused" in row else {}  # the grader has what was compiled elsewhere
            self._cache[id(fn), key] = compiled
            self.compiling_now = "", ""
        self.kernels.setdefault(fn.__name__, compiled)
        handle = Handle(compiled, target, lambda size, bound: self._launch(compiled, size, bound))
        if not warmup:
            self._launch(compiled, _grid(grid, bound), bound)
        return handle

    def _row(self, compiled: _Compiled, backend: Any, target: GPUTarget) -> dict[str, Any]:
        """Return what the engine needs of a kernel: the whole from this process, or key and text of a kernel compiled elsewhere.

        The process that compiles elsewhere executes no host code, so this one lists the results of functions on constants, for
        which it compiles as well. It also does where compiling fails, because its exception tells the line of the submission.
        """

        def here() -> dict[str, Any]:
            source = ASTSource(compiled.fn, compiled.signature, compiled.constexprs, compiled.attrs)
            return kernel_row(ttir_of(source, backend, compiled.options, target), compiled.options)

        if self.elsewhere is None:
            return here()
        row = recipe(compiled.fn, compiled.signature, compiled.constexprs, compiled.attrs, compiled.options)
        if row.pop("evaluates"):
            with evaluated() as row["results"]:
                here()
        answer = self.elsewhere(row)
        if isinstance(answer.get("key"), str):
            return {"key": answer["key"], "text": answer["text"]}
        here()
        raise NotRebuilt(str(answer.get("error")))

    def _launch(self, compiled: _Compiled, size: tuple[int, int, int], bound: Mapping[str, Any]) -> None:
        self.launches.append(Launch(compiled.fn.__name__, size, opts.num_warps if (opts := compiled.options) else 4))
        if self.recorder is not None and 0 not in size:
            values, names = _arguments(bound, compiled.signature, self.recorder)
            self.recorder.launch(compiled.key, compiled.text, size, values, names)

    def _run_cuda(self, fn: JITFunction, args: tuple[Any, ...], grid: Any, warmup: bool, kwargs: dict[str, Any]) -> Any:
        ablate = self.leaves_out and not warmup
        if fn.__name__ not in self.kernels and self.records:
            call = dict(kwargs) | {"debug": kwargs.get("debug", fn.debug)}
            if hasattr(triton.knobs.compilation, "instrumentation_mode"):
                call.setdefault("instrumentation_mode", triton.knobs.compilation.instrumentation_mode)
            device = triton.runtime.driver.active.get_current_device()
            _, _, _, backend, binder = fn.device_caches[device]
            bound, specialization, options = binder(*args, **call)
            opts, signature, constexprs, attrs = fn._pack_args(backend, call, bound, specialization, options)
            first = _Compiled(fn, signature, constexprs, attrs, opts, _build_options(kwargs, fn))
            first.described = _described(first)
            self.kernels[fn.__name__] = first
        with self.ahead.collecting() if ablate else contextlib.nullcontext():
            kernel = self._original(fn, *args, grid=grid, warmup=warmup or ablate, **kwargs)
        if isinstance(kernel, FutureKernel):
            kernel = Pending(kernel)
        if self.records and not warmup:
            if self.mode == "run" and kernel is not None and not self.kernels[fn.__name__].dots:
                self.kernels[fn.__name__].dots = dot_kinds(kernel.asm.get("ttir", ""))
            self.launches.append(Launch(fn.__name__, (0, 0, 0), 0))
        return kernel

    def _again(self, kernel: Any) -> bool:
        """Record the launch of a compiled kernel object (CUDA); return false where launches are left out."""
        name = kernel.src.fn.__name__
        if self.records:
            if self.mode == "run" and name in self.kernels and not self.kernels[name].dots:
                self.kernels[name].dots = dot_kinds(kernel.asm.get("ttir", ""))
            self.launches.append(Launch(name, (0, 0, 0), 0))
        return not self.leaves_out

    def dots(self) -> list[str]:
        """Return the kinds of matrix products in the kernels of this call (CUDA; on the CPU tier the engine knows them)."""
        used = {launch.kernel for launch in self.launches}
        return sorted(set().union(*(self.kernels[k].dots for k in used if k in self.kernels), set()))

    def specialisations(self, name: str) -> int:
        """Return how many specialisations of the kernels of a name have been compiled (CPU tier)."""
        return sum(1 for compiled in self._cache.values() if compiled.fn.__name__ == name)

    def build(self, targets: list[str]) -> list[dict[str, Any]]:
        """Compile every kernel seen so far for targets that it has not been built for.

        Args:
            targets: keys of ``TARGETS``.

        Returns:
            One row for each new pair of kernel and target: ``ok``, resources, seconds, and ``error`` where it failed.
        """
        rows = []
        for name, compiled in list(self.kernels.items()):
            for target in targets:
                if (name, target) not in self.built:
                    self.built.add((name, target))
                    count = self.specialisations(name)
                    of = f"; the first of {count}" if count > 1 else ""
                    ready = compiled.ttir if target == self.target else ""
                    rows.append(_build(name, compiled, target, ready) | {"specialisation": compiled.described + of})
        return rows


def quick_launchers() -> None:
    """Make Triton run gcc with -O1: its own -O3 takes twice as long, for a few lines of C that pass arguments on."""
    real = build._build
    if "ccflags" not in inspect.signature(real).parameters:
        return

    def quick(*args: Any, **kwargs: Any) -> str:
        given = inspect.signature(real).bind(*args, **kwargs)
        given.arguments["ccflags"] = [*given.arguments["ccflags"], "-O1"]  # the last of several levels applies
        return real(*given.args, **given.kwargs)

    build._build = quick


def _build_options(kwargs: Mapping[str, Any], fn: JITFunction) -> dict[str, Any]:
    names = {p.name for p in fn.params}
    known = ("num_warps", "num_stages", "num_ctas", "maxnreg", "enable_fp_fusion")
    return {k: v for k, v in kwargs.items() if k in known and k not in names}


def _described(compiled: _Compiled) -> str:
    declared = frozenset(p.name for p in compiled.fn.params if p.is_constexpr)
    return described(compiled.signature, compiled.constexprs, declared)


def _grid(grid: Any, bound: Mapping[str, Any]) -> tuple[int, int, int]:
    size = grid(bound) if callable(grid) else grid
    size = (size,) if isinstance(size, int) else tuple(int(n) for n in size)
    return (*size, 1, 1, 1)[:3]  # type: ignore[return-value]


def _arguments(
    bound: Mapping[str, Any], signature: Mapping[str, str], recorder: Recorder
) -> tuple[list[Any], list[str]]:
    """Return the runtime values in the order of the compiled function, and their names; pointers are addresses."""
    values: list[Any] = []
    names: list[str] = []

    def put(name: str, value: Any) -> None:
        values.append(value)
        names.append(name)

    def add(name: str, value: Any, kind: Any) -> None:
        if isinstance(kind, tuple):
            for i, (v, k) in enumerate(zip(value, kind, strict=True)):
                add(f"{name}[{i}]", v, k)
        elif kind == "constexpr":
            return
        elif hasattr(value, "base") and hasattr(value, "block_shape"):
            recorder.view(value.base)
            shape, strides = [int(n) for n in value.shape], [int(n) for n in value.strides]
            padding = str(getattr(value, "padding", "zero"))
            put(name, {"base": value.base.data_ptr(), "shape": shape, "strides": strides, "padding": padding})
            # The compiled function takes shape and strides again, as integers.
            for k, n in enumerate((*shape, *strides)):
                put(f"{name}[{k}]", n)
        elif hasattr(value, "data_ptr"):
            recorder.view(getattr(value, "base", value))
            put(name, value.data_ptr())
        else:
            put(name, int(value) if isinstance(value, bool) else value)

    for name, kind in signature.items():
        add(name, bound[name], kind)
    return values, names


def dot_kinds(ttir: str) -> frozenset[str]:
    """Return the kinds of ``tt.dot`` in a TTIR text, as ``i8*i8->i32``."""
    pattern = (
        r"tt\.dot .*?: tensor<[\dx]*x([a-z]\w*)[^>]*> \* tensor<[\dx]*x([a-z]\w*)[^>]*> -> tensor<[\dx]*x([a-z]\w*)"
    )
    return frozenset(f"{a}*{b}->{c}" for a, b, c in re.findall(pattern, ttir))


def _build(name: str, compiled: _Compiled, target: str, ttir: str = "") -> dict[str, Any]:
    """Compile a kernel for a target.

    Args:
        name: of the kernel.
        compiled: its specialisation.
        target: a key of ``TARGETS``.
        ttir: the specialisation as it was compiled for this target, which is not done again; "" if it was not.

    Returns:
        The row that ``Interceptor.build`` describes.
    """
    row: dict[str, Any] = {"kernel": name, "target": target, "ok": False, "shared_limit": SHARED_LIMIT[target]}
    start = time.perf_counter()
    try:
        gpu = TARGETS[target]
        options = {
            k: v
            for k, v in compiled.launch_options.items()
            if k in ("num_warps", "num_stages", "enable_fp_fusion") or gpu.backend == "cuda"
        }
        attrs = compiled.attrs
        source = ASTSource(compiled.fn, compiled.signature, compiled.constexprs, attrs)
        options = make_backend(gpu).parse_options(options).__dict__
        kernel = triton.compile(_file(ttir) if ttir else source, target=gpu, options=options)
        row["shared"], row["warps"] = int(kernel.metadata.shared), int(kernel.metadata.num_warps)
        row |= _resources(kernel, gpu.backend)
        row["ok"] = row["shared"] <= SHARED_LIMIT[target]
        if not row["ok"]:
            row["error"] = f"needs {row['shared']} bytes of shared memory, {target} has {SHARED_LIMIT[target]}"
    except Exception as e:  # any exception of the compiler is the submission's result on this target
        row["error"] = f"{type(e).__name__}: {e}"[:500]
    row["seconds"] = round(time.perf_counter() - start, 4)
    return row


def _file(ttir: str) -> str:
    """Write TTIR to a file for the compiler, and return its path."""
    with tempfile.NamedTemporaryFile("w", suffix=".ttir", delete=False) as f:
        f.write(ttir)
    return f.name


def _resources(kernel: Any, backend: str) -> dict[str, int | None]:
    if backend == "hip":
        text = kernel.asm.get("amdgcn", "")
        found = {k: re.search(rf"\.{k}:\s+(\d+)", text) for k in ("vgpr_count", "vgpr_spill_count")}
        values = [int(m.group(1)) if m else None for m in found.values()]
        return {"registers": values[0], "spills": values[1]}
    used = resources(kernel.asm["cubin"])
    return {"registers": used.registers, "spills": used.local_bytes}
