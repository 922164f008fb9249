"""Measure how much single calls of torch eager differ: on a quiet machine, beside a load on every core, and beside CUDA contexts.

    python benchmarks/eager_spread.py OUT.jsonl [--tasks 'linearalgebra/*'] [--calls 40] [--slow-us 5000] [--seconds S]
                                      [--contexts 3]

Eager is the denominator of every speedup. Where it spends its time on the host, as solvers of small matrices do, other work on the
cores makes it slower, and the speedup larger. So does whoever asks NVIDIA's driver for something, if eager asks it in each call: it
serves one process of the host at a time. Each line of OUT is one timed case whose call takes at least ``--slow-us`` microseconds.
It has the times of its calls in order, in microseconds, without a load, with one on the cores, and beside ``--contexts`` processes
that make one CUDA context after the other; which of the calls the host enqueued too late for the device; and by the number of a
request to the driver, how often a call makes it (null without gcc). Nothing else uses the GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import multiprocessing
import os
import shutil
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
if __package__ in (None, ""):
    sys.path.insert(0, str(ROOT))

import torch

from benchmarks import driver_lock, hold_steps
from benchmarks.experts_timed import load_on_all_cores
from kbx_env import jsonl
from kbx_env.grading import compulsory_work, reference
from kbx_env.grading.sizes import timed
from kbx_env.grading.timing import input_windows
from kbx_env.grading.timing.contestants import EagerContestant
from kbx_env.grading.timing.input_windows import InputWindows
from kbx_env.spec.catalog import load_task, task_ids

TASKS = (
    "linearalgebra/*,normalization/spectral_norm_eig,normalization/symmetric_matrix_vector_norm,fusion/fused_*_solve,"
    "fusion/fused_masked_select_add_gelu,matrixmultiply/matrix_power_eig"
)
START_SECONDS, MOST_SECONDS = 60.0, 300.0
"""Seconds until a process must have made its first context, and for which it makes contexts at most."""


def times(contestant: EagerContestant, calls: int) -> dict[str, list[float]]:
    """Time single calls, each in a block of its own as slow calls are timed in a grading.

    Args:
        contestant: eager, prepared.
        calls: how many.

    Returns:
        Microseconds of each call, and the numbers of the late ones.
    """
    us: list[float] = []
    late: list[float] = []
    for k in range(calls):
        with reference.exact_matmul():
            reply = contestant.watch.measure({"order": [k % 2], "turns": None, "flush": True, "warm": False})
        us.append(float(reply["us"][0]))
        late += [k] * bool(reply["late"])
    return {"us": us, "late": late}


@contextlib.contextmanager
def contexts_made(processes: int) -> Iterator[None]:
    """Have so many processes make one CUDA context after the other on this GPU within the block."""
    spawn = multiprocessing.get_context("spawn")
    uuid = f"GPU-{str(torch.cuda.get_device_properties(0).uuid).removeprefix('GPU-')}"
    begun, made = spawn.Semaphore(0), list[Any]()
    try:
        for _ in range(processes):
            made.append(spawn.Process(target=_make_contexts, args=(uuid, begun), daemon=True))
            made[-1].start()
        for _ in made:
            if not begun.acquire(timeout=START_SECONDS):
                raise RuntimeError(f"no context in {START_SECONDS:.0f} s")
        yield
        if ended := [p.exitcode for p in made if not p.is_alive()]:
            raise RuntimeError(f"processes that make contexts have ended, with exit status {ended}")
    finally:
        for process in made:
            process.kill()
            process.join()


def _make_contexts(uuid: str, begun: Any) -> None:
    """Make one context, tell so, and then one after the other for at most ``MOST_SECONDS``."""
    driver_lock._chain(uuid, False, time.time() + 0.01)
    begun.release()
    driver_lock._chain(uuid, False, time.time() + MOST_SECONDS)


def requests() -> dict[int, int] | None:
    """Return how often this process has made each request to the driver, by its number; ``None`` where nobody counts.

    Those to unified memory have numbers from 256 on.
    """
    with contextlib.suppress(OSError, KeyError):
        counts = Path(os.environ[hold_steps.COUNTS], str(os.getpid())).read_bytes()
        return {k: made for k, (made, _) in enumerate(struct.iter_unpack("QQ", counts)) if made}
    return None


def spread(name: str, index: int, calls: int, slow_us: float, contexts: int) -> dict[str, Any] | None:
    """Measure one timed case.

    Args:
        name: id of the task.
        index: of the case among those that fit into the device's memory.
        calls: calls without, and calls with the load.
        slow_us: microseconds of a call from which on a case is measured.
        contexts: processes that make contexts.

    Returns:
        A JSON object; ``None`` if the call is faster.
    """
    task = load_task(name)
    case = compulsory_work.fitting(task, torch.cuda.get_device_properties(0).total_memory, timed(task, "published"))[index]
    contestant = EagerContestant(task, case)
    try:
        contestant.prepare(InputWindows.draw(task, case, list(range(input_windows.MAX_DRAWS)), "cuda"), 2)
        if statistics.median(times(contestant, 3)["us"]) < slow_us:
            return None
        before = requests()
        quiet = times(contestant, calls)
        after = requests()
        each = None if before is None or after is None else {str(k): (n - before.get(k, 0)) / calls for k, n in after.items()}
        with load_on_all_cores(True):
            loaded = times(contestant, calls)
        with contexts_made(contexts):
            beside = times(contestant, calls)
        return {"task": name, "case": case.label(), "quiet": quiet, "loaded": loaded, "contexts": beside,
                "requests_a_call": each and {number: made for number, made in each.items() if made}}  # fmt: skip
    finally:
        contestant.watch.close()
        torch.cuda.empty_cache()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; exit status 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT.jsonl")
    parser.add_argument("--tasks", default=TASKS, help="comma-separated patterns of task ids")
    parser.add_argument("--calls", type=int, default=40, help="of each case, without and with the load")
    parser.add_argument("--slow-us", type=float, default=5000.0, help="microseconds of a call from which on a case is measured")
    parser.add_argument("--contexts", type=int, default=3, help="processes that make contexts (default: 3)")
    parser.add_argument("--seconds", type=float, default=90.0, help="after which no case begins")
    a = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("eager_spread.py: it measures a CUDA GPU, and there is none", file=sys.stderr)
        return 2
    if hold_steps.COUNTS not in os.environ and shutil.which("gcc"):
        with tempfile.TemporaryDirectory() as folder:
            counting = hold_steps.counting(Path(folder))
            return subprocess.run([sys.executable, __file__, *(sys.argv[1:] if argv is None else argv)], env=counting).returncode
    began, memory = time.monotonic(), torch.cuda.get_device_properties(0).total_memory
    with a.out.open("w") as out:
        for name in (t for t in task_ids() if any(fnmatch.fnmatch(t, p.strip()) for p in a.tasks.split(","))):
            for index in range(len(compulsory_work.fitting(load_task(name), memory, timed(load_task(name), "published")))):
                if time.monotonic() - began > a.seconds:
                    return 0
                if row := spread(name, index, a.calls, a.slow_us, a.contexts):
                    out.write(jsonl.encode(row))
                    out.flush()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
