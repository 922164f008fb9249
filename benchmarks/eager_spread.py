"""Measure how much single calls of torch eager differ, on a quiet machine and beside a load on every core.

    python benchmarks/eager_spread.py OUT.jsonl [--tasks 'linearalgebra/*'] [--calls 40] [--slow-us 5000] [--seconds S]

Eager is the denominator of every speedup. Where it spends its time on the host, as solvers of small matrices do, other work on the
cores makes it slower, and the speedup larger. Each line of OUT is one timed case whose call takes at least ``--slow-us``
microseconds: the times of its calls in order, in microseconds, without and with the load, and which of them the host enqueued too
late for the device. One process, nothing else on the GPU.
"""

from __future__ import annotations

import argparse
import fnmatch
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
if __package__ in (None, ""):
    sys.path.insert(0, str(ROOT))

import torch

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


def spread(name: str, index: int, calls: int, slow_us: float) -> dict[str, Any] | None:
    """Measure one timed case.

    Args:
        name: id of the task.
        index: of the case among those that fit into the device's memory.
        calls: calls without, and calls with the load.
        slow_us: microseconds of a call from which on a case is measured.

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
        quiet = times(contestant, calls)
        with load_on_all_cores(True):
            loaded = times(contestant, calls)
        return {"task": name, "case": case.label(), "quiet": quiet, "loaded": loaded}
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
    parser.add_argument("--seconds", type=float, default=90.0, help="after which no case begins")
    a = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("eager_spread.py: it measures a CUDA GPU, and there is none", file=sys.stderr)
        return 2
    began, memory = time.monotonic(), torch.cuda.get_device_properties(0).total_memory
    with a.out.open("w") as out:
        for name in (t for t in task_ids() if any(fnmatch.fnmatch(t, p.strip()) for p in a.tasks.split(","))):
            for index in range(len(compulsory_work.fitting(load_task(name), memory, timed(load_task(name), "published")))):
                if time.monotonic() - began > a.seconds:
                    return 0
                if row := spread(name, index, a.calls, a.slow_us):
                    out.write(jsonl.encode(row))
                    out.flush()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
