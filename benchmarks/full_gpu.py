"""Fill a GPU with gradings of the largest cases, and tell which ended as a fault, and who held the memory when least was free.

    python benchmarks/full_gpu.py OUT.json [--workers 14] [--least-gib 1.0] [--each 2] [--largest 8] [--hold GIB]

Grades the experts of all tasks whose largest timed case has so many GiB of inputs or results, with times, ``--each`` times, and
that of the largest task ``--largest`` times. Every one of them is right, so each outcome that is not correct is a fault of ours.
``--hold`` takes memory of the GPU before, as a smaller card would have less. Exit status 1 if an outcome was not correct.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from kbx_env.eval import throughput
from kbx_env.eval.workload import Piece

from kbx_env import versions
from kbx_env.deadlines import deadline_of
from kbx_env.executor.pools.gpu import gpu_pool, uuids_of
from kbx_env.grading import compulsory_work
from kbx_env.grading.sizes import timed
from kbx_env.spec.catalog import expert_source, load_tasks

SAMPLE_SECONDS = 0.2
"""Seconds between two samples of the memory."""


def large_tasks(least: float) -> list[tuple[float, str]]:
    """Return the size in GiB of the largest timed case, and the id, of each task with at least so many; the largest first."""
    found = []
    for task in load_tasks():
        cases = timed(task, "published")
        size = max(max(compulsory_work.input_bytes(task, c), compulsory_work.declared_bytes(task, c) or 0) for c in cases)
        if size / 2**30 >= least:
            found.append((size / 2**30, task.id))
    return sorted(found, reverse=True)


class MemoryTrace:
    """Samples which process holds how much of a GPU's memory, in a thread.

    Attributes:
        fullest: the sample with the least free memory: seconds since the start, free GiB, and the GiB of each process.
    """

    def __init__(self, uuid: str) -> None:
        import pynvml

        pynvml.nvmlInit()
        self._nvml, self._handle = pynvml, pynvml.nvmlDeviceGetHandleByUUID(uuid)
        self.fullest: dict[str, Any] = {}
        self._began, self._over = time.monotonic(), threading.Event()
        threading.Thread(target=self._watch, daemon=True).start()

    def stop(self) -> None:
        """End sampling."""
        self._over.set()

    def _watch(self) -> None:
        while not self._over.wait(SAMPLE_SECONDS):
            free = self._nvml.nvmlDeviceGetMemoryInfo(self._handle).free / 2**30
            if not self.fullest or free < self.fullest["free_gib"]:
                held = self._nvml.nvmlDeviceGetComputeRunningProcesses(self._handle)
                sizes = sorted(((p.usedGpuMemory or 0) / 2**30 for p in held if p.pid != os.getpid()), reverse=True)
                self.fullest = {"seconds": round(time.monotonic() - self._began, 1), "free_gib": round(free, 2),
                                "processes_gib": [round(s, 2) for s in sizes]}  # fmt: skip


def main() -> None:
    """Grade and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--workers", type=int, default=14)
    parser.add_argument("--least-gib", type=float, default=1.0)
    parser.add_argument("--each", type=int, default=2)
    parser.add_argument("--largest", type=int, default=8)
    parser.add_argument("--hold", type=float, default=0.0, metavar="GIB")
    a = parser.parse_args()
    uuids = uuids_of(1)
    tasks = large_tasks(a.least_gib)
    if not tasks:
        parser.error(f"--least-gib is {a.least_gib:g}; no task has a timed case of so many GiB")
    names = [task for _, task in tasks for _ in range(a.each)] + [tasks[0][1]] * (a.largest - a.each)
    random.Random(0).shuffle(names)
    pieces = [Piece(task, (expert_source(task) or "").encode(), "expert") for task in names]
    options = {"backend": "cuda", "targets": (), "timing": True, "precision": "training"}
    pools = gpu_pool(1, a.workers, uuids=uuids)  # before torch uses the GPU here
    import torch

    held = torch.empty(int(a.hold * 2**30), dtype=torch.uint8, device="cuda") if a.hold else None
    trace = MemoryTrace(uuids[0])
    result = throughput.measure(pieces, pools, options, warm=a.workers, deadline=deadline_of(True))
    trace.stop()
    del held
    shown = ("task", "verdict", "attempts", "faults", "message")
    faults = [{k: r[k] for k in shown} for r in result["requests"] if r["verdict"] != "correct" or r["faults"]]
    wrong = sum(r["verdict"] != "correct" for r in result["requests"])
    again = sum(r["attempts"] > 1 for r in result["requests"])
    about = {"environment": versions.environment("cuda"), "workers": a.workers, "hold_gib": a.hold, "largest_gib": tasks[0][0]}
    summary = {"gradings": len(names), "not_correct": wrong, "second_attempts": again, "seconds": result["wall_seconds"],
               "fullest": trace.fullest, "faults": faults}  # fmt: skip
    a.out.write_text(json.dumps(about | summary | {"requests": result["requests"]}, indent=1) + "\n")
    print(json.dumps(summary, indent=1))
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
