"""Measure how much faster kernels compile in several threads of a process, or in several processes. It needs no GPU.

    python benchmarks/compile_threads.py OUT.json [--kernels 24] [--most 8]

Each row is so many specialisations of one softmax, compiled for sm_90 from the source to the cubin: by 1, 2, 4, ... threads of
this process, with Python's own switch interval (5 ms) and with the one of runners, and by as many forked processes. Threads compete
for Python's lock while they translate the source and write files; LLVM and ptxas work outside of it.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import triton
import triton.language as tl
from triton.compiler import ASTSource

from kbx_env import versions
from kbx_env.sandbox import compile_cache, specialised
from kbx_env.sandbox.compile_ahead import SWITCH_SECONDS
from kbx_env.sandbox.fake_cuda.driver import TARGETS


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


def compile_one(kind: int) -> None:
    """Compile one specialisation, as a runner does."""
    source = ASTSource(_softmax, SIGNATURE, {(4,): 1 << (5 + kind % SIZES), (5,): kind}, ALIGNED)
    triton.compile(source, target=TARGETS["sm_90"], options={"num_warps": 4})


def compile_many(kinds: Sequence[int]) -> None:
    """Compile some, one after the other."""
    for kind in kinds:
        compile_one(kind)


def measure(kernels: int, most: int) -> Iterator[dict[str, Any]]:
    """Yield a row for each number of threads and processes; times in seconds."""
    first = 1
    counts = [n for n in (1, 2, 4, 8, 16) if n <= most]
    own = sys.getswitchinterval()
    for interval in (own, SWITCH_SECONDS):
        sys.setswitchinterval(interval)
        for n in counts:
            began = time.perf_counter()
            with ThreadPoolExecutor(n) as pool:
                list(pool.map(compile_one, range(first, first + kernels)))
            yield {"threads": n, "switch_interval": interval, "seconds": time.perf_counter() - began}
            first += kernels
    sys.setswitchinterval(own)
    fork = multiprocessing.get_context("fork")
    for n in counts:
        # Runs of neighbours, so that each process has kernels of all sizes.
        parts = [range(first + kernels * k // n, first + kernels * (k + 1) // n) for k in range(n)]
        workers = [fork.Process(target=compile_many, args=(part,)) for part in parts]
        began = time.perf_counter()
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        if any(worker.exitcode for worker in workers):
            raise RuntimeError(f"{n} processes: one of them failed")
        yield {"processes": n, "seconds": time.perf_counter() - began}
        first += kernels


def main() -> int:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT.json")
    parser.add_argument("--kernels", type=int, default=24)
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
        compile_one(0)  # loads the compiler
        rows = []
        for row in measure(a.kernels, a.most):
            print(", ".join(f"{k} {v:.4g}" for k, v in row.items()), flush=True)
            rows.append({k: round(v, 6) for k, v in row.items()})
    result = {"environment": versions.environment("cpu"), "kernels": a.kernels, "rows": rows}
    a.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
