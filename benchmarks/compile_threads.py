"""Measure how much faster kernels compile in several threads of a process, or in several processes. It needs no GPU.

    python benchmarks/compile_threads.py OUT.json [--kernels 24 | --task math/fftn] [--most 8]

Each row is so many specialisations of one softmax, or all kernels that the expert of a task launches at its timed sizes, compiled
for sm_90 from the source to the cubin: by 1, 2, 4, ... threads of this process, with Python's own switch interval (5 ms) and with
the one of runners, and by as many forked processes. Threads compete for Python's lock while they translate the source and write
files; LLVM and ptxas work outside of it.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import runpy
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeAlias

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import torch
import triton
import triton.language as tl
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction, compute_cache_key

from kbx_env import versions
from kbx_env.errors import UsageError
from kbx_env.grading import inputs, reference
from kbx_env.protocol.wire import assembled
from kbx_env.sandbox import compile_cache, specialised
from kbx_env.sandbox.compile_ahead import SWITCH_SECONDS
from kbx_env.sandbox.fake_cuda.driver import TARGETS, StandInDriver
from kbx_env.spec.catalog import expert_source, load_task


@triton.jit
def _softmax(x, y, n, stride, BLOCK: tl.constexpr, KIND: tl.constexpr):
    """Normalise one row per program; KIND makes one kernel of each number."""
    row, cols = tl.program_id(0), tl.arange(0, BLOCK)
    v = tl.load(x + row * stride + cols, mask=cols < n, other=-float("inf")).to(tl.float32)
    e = tl.exp(v - tl.max(v, 0))
    tl.store(y + row * stride + cols, (e / tl.sum(e, 0)).to(y.dtype.element_ty), mask=cols < n)


SIGNATURE = {"x": "*fp32", "y": "*fp32", "n": "i32", "stride": "i32", "BLOCK": "constexpr", "KIND": "constexpr"}
SIZES = 8
"""Different sizes of blocks; so many kernels in a row have all of them."""
ALIGNED = {(0,): [["tt.divisibility", 16]], (1,): [["tt.divisibility", 16]]}


Compile: TypeAlias = Callable[[], object]
"""Compiles one kernel."""


def softmax(kind: int) -> Compile:
    """Return what compiles one specialisation, as a runner does."""
    source = ASTSource(_softmax, SIGNATURE, {(4,): 1 << (5 + kind % SIZES), (5,): kind}, ALIGNED)
    return lambda: triton.compile(source, target=TARGETS["sm_90"], options={"num_warps": 4})


def timed_kernels(task_id: str, folder: str) -> list[Compile]:
    """Return what compiles each kernel that the expert of a task launches at its timed sizes. Nothing is launched.

    Args:
        task_id: the task.
        folder: gets the source.

    Raises:
        UsageError: there is no such expert.
    """
    source = expert_source(task_id)
    if source is None:
        raise UsageError(f"no expert for {task_id}; --task takes names such as math/fftn")
    task, found = load_task(task_id), dict[str, Compile]()

    def run(fn: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        kwargs.setdefault("debug", fn.debug)
        if hasattr(triton.knobs.compilation, "instrumentation_mode"):
            kwargs.setdefault("instrumentation_mode", triton.knobs.compilation.instrumentation_mode)
        _, keys, target, backend, binder = fn.device_caches[0]
        bound, specialization, options = binder(*args, **kwargs)
        packed, signature, constexprs, attrs = fn._pack_args(backend, kwargs, bound, specialization, options)
        ast = ASTSource(fn, signature, constexprs, attrs)
        key = fn.__name__ + compute_cache_key(keys, specialization, options)
        found[key] = lambda: triton.compile(ast, target=target, options=packed.__dict__)

    path = Path(folder, "expert.py")
    path.write_text(source)
    triton.runtime.driver.set_active(StandInDriver(TARGETS["sm_90"]))
    real, JITFunction.run = JITFunction.run, run  # type: ignore[method-assign]
    try:
        entry = runpy.run_path(str(path))[task.entry]
        for case in task.timed:
            described = inputs.described(task, case)  # without values
            args = {
                n: torch.empty_strided(v.shape, v.stride(), dtype=v.dtype) if isinstance(v, torch.Tensor) else v
                for n, v in described.items()
            }  # fmt: skip
            entry(**assembled(reference.resolve(args, "cpu")))
    finally:
        JITFunction.run = real  # type: ignore[method-assign]
    return list(found.values())


def compile_many(kernels: Sequence[Compile]) -> None:
    """Compile some, one after the other."""
    for kernel in kernels:
        kernel()


def measure(kernels: Sequence[Compile], most: int, folder: str) -> Iterator[dict[str, Any]]:
    """Yield a row for each number of threads and processes; times in seconds. Each row has a cache below ``folder`` of its own."""
    counts = [n for n in (1, 2, 4, 8, 16) if n <= most]
    own = sys.getswitchinterval()
    for interval in (own, SWITCH_SECONDS):
        sys.setswitchinterval(interval)
        for n in counts:
            triton.knobs.cache.dir = tempfile.mkdtemp(dir=folder)
            began = time.perf_counter()
            with ThreadPoolExecutor(n) as pool:
                list(pool.map(lambda kernel: kernel(), kernels))
            yield {"threads": n, "switch_interval": interval, "seconds": time.perf_counter() - began}
    sys.setswitchinterval(own)
    fork = multiprocessing.get_context("fork")
    for n in counts:
        triton.knobs.cache.dir = tempfile.mkdtemp(dir=folder)
        # Runs of neighbours, so that each process has kernels of all sizes.
        parts = [kernels[len(kernels) * k // n : len(kernels) * (k + 1) // n] for k in range(n)]
        workers = [fork.Process(target=compile_many, args=(part,)) for part in parts]
        began = time.perf_counter()
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        if any(worker.exitcode for worker in workers):
            raise RuntimeError(f"{n} processes: one of them failed")
        yield {"processes": n, "seconds": time.perf_counter() - began}


def main() -> int:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT.json")
    parser.add_argument("--kernels", type=int, default=24)
    parser.add_argument("--task", help="compile the timed kernels of this task's expert instead")
    parser.add_argument("--most", type=int, default=8, help="threads or processes at most (default: 8)")
    a = parser.parse_args()
    if a.kernels < SIZES or a.kernels % SIZES or a.most < 1:
        print(f"compile_threads.py: --kernels takes a multiple of {SIZES}, and --most 1 or more, not {a.kernels} and {a.most}",
              file=sys.stderr)  # fmt: skip
        return 2
    with tempfile.TemporaryDirectory() as folder:
        triton.knobs.cache.dir = folder
        compile_cache.install()
        specialised.keep_contexts()
        softmax(0)()  # loads the compiler
        try:
            kernels = [softmax(k + 1) for k in range(a.kernels)] if a.task is None else timed_kernels(a.task, folder)
        except UsageError as e:
            print(f"compile_threads.py: {e}", file=sys.stderr)
            return 2
        rows = []
        for row in measure(kernels, a.most, folder):
            print(", ".join(f"{k} {v:.4g}" for k, v in row.items()), flush=True)
            rows.append({k: round(v, 6) for k, v in row.items()})
    result = {"environment": versions.environment("cpu"), "task": a.task, "kernels": len(kernels), "rows": rows}
    a.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
