"""Replay recorded gradings against the real GPU lock, with sleeps in place of their work. No GPU is needed.

    python benchmarks/lock_rhythm.py RESULT.json [--workers 14 20] [--batch 4] [--window 1.5] [--crowd 4 99] [--turn 0.12]

RESULT.json is a result of ``eval/throughput.py --json`` on a GPU. Each worker is a process that takes the next recorded request and
sleeps for its seconds of a core; then it shares the lock for the first half of its shared seconds, has it alone, and shares it for
the other half. A sharer gives way every ``--turn`` seconds. A row for each setting has the requests a second, and the shares of the
time in which the lock was held alone and in which nobody held it. Waits for memory and contexts are left out, and so is the start.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from kbx_env.eval.simulate import Job, jobs_of

from kbx_env.grading.timing import gpu_lock
from kbx_env.grading.timing.gpu_lock import GpuHold, GpuLock


def worker(folder: str, jobs: Sequence[Job], taken: Any, turn: float, ends: Any) -> None:
    """Take requests until none is left."""
    lock = GpuLock("replay", folder)

    def share(seconds: float) -> None:
        with hold.using():
            while seconds > 0:
                time.sleep(min(seconds, turn))
                seconds -= turn
                hold.give_way()

    while True:
        with taken.get_lock():
            number, taken.value = taken.value, taken.value + 1
        if number >= len(jobs):
            return
        job, hold = jobs[number], GpuHold(lock)
        time.sleep(job.core + job.slot)
        share(job.shared / 2 if job.alone else job.shared)
        if job.alone:
            with hold.alone():
                time.sleep(job.alone)
            share(job.shared / 2)
        ends[number] = time.monotonic()


def replayed(jobs: Sequence[Job], workers: int, turn: float, batch: int, window: float, crowd: int) -> dict[str, float]:
    """Replay requests with one setting of the lock.

    Args:
        jobs: the requests, in their order.
        workers: processes.
        turn: seconds after which a sharer gives way.
        batch: see ``gpu_lock.EXCLUSIVE_BATCH``.
        window: see ``gpu_lock.SHARED_WINDOW_SECONDS``.
        crowd: see ``gpu_lock.CROWD``.

    Returns:
        The setting, ``requests_per_second`` and ``alone``, the share of the time for which the lock was held alone. The time ends
        when the last worker begins its last request.
    """
    gpu_lock.EXCLUSIVE_BATCH, gpu_lock.SHARED_WINDOW_SECONDS, gpu_lock.CROWD = batch, window, crowd
    context = multiprocessing.get_context("fork")
    taken: Synchronized[int] = context.Value("i", 0)
    ends = context.Array("d", len(jobs))
    with tempfile.TemporaryDirectory() as folder:
        begin = time.monotonic()
        processes = [context.Process(target=worker, args=(folder, jobs, taken, turn, ends)) for _ in range(workers)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
    # When few workers have something left to do, the rate says nothing.
    full = sorted(ends)[: len(jobs) - workers + 1]
    seconds = full[-1] - begin
    alone = sum(j.alone for j, end in zip(jobs, ends, strict=True) if end <= full[-1])
    return {"workers": workers, "batch": batch, "window": window, "crowd": crowd, "turn": turn,
            "requests_per_second": round(len(full) / seconds, 3), "alone": round(alone / seconds, 3)}  # fmt: skip


def main() -> None:
    """Print a row for each setting, as JSON lines."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("result", metavar="RESULT.json")
    p.add_argument("--workers", type=int, nargs="+", default=[14])
    p.add_argument("--batch", type=int, nargs="+", default=[gpu_lock.EXCLUSIVE_BATCH])
    p.add_argument("--window", type=float, nargs="+", default=[gpu_lock.SHARED_WINDOW_SECONDS], help="seconds")
    p.add_argument("--crowd", type=int, nargs="+", default=[gpu_lock.CROWD])
    p.add_argument("--turn", type=float, nargs="+", default=[0.12], help="seconds")
    a = p.parse_args()
    jobs = jobs_of(json.loads(Path(a.result).read_text()), 0.0)
    for workers, turn, batch, window, crowd in itertools.product(a.workers, a.turn, a.batch, a.window, a.crowd):
        print(json.dumps(replayed(jobs, workers, turn, batch, window, crowd)), flush=True)


if __name__ == "__main__":
    main()
