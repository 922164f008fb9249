"""Measure the verdicts a second of the CPU tier, for correct kernels on warm worker processes.

    python benchmarks/cpu_rate.py [--tasks GLOB] [--workers N] [--seconds S] [--targets LIST] [--profile N]

Every expert that matches is graded once to warm up, then all in turn for ``--seconds``. Prints one JSON object: verdicts per
second, seconds of a verdict (quartiles, by stage), processor time of a verdict, and the load average. On a shared machine the
processor time is more reliable than the rate. ``--profile N`` grades N sources in this process instead and prints the functions
that take the most time.
"""

from __future__ import annotations

import argparse
import cProfile
import itertools
import json
import os
import pstats
import statistics
import sys
import time
from collections import Counter
from concurrent.futures import FIRST_COMPLETED, Future, wait
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from kbx_env.errors import UsageError
from kbx_env.executor import Executor, ProcessPool, Request
from kbx_env.outcome import Outcome
from kbx_env.spec.catalog import expert_source, task_ids


def requests(pattern: str, targets: list[str]) -> list[Request]:
    """Return one request for every expert whose task matches.

    Args:
        pattern: patterns of tasks.
        targets: ahead-of-time targets.

    Returns:
        The requests.

    Raises:
        UsageError: no task matches.
    """
    options = {"backend": "cpu", "targets": targets}
    found = [t for t in task_ids() if any(fnmatchcase(t, p) for p in pattern.split(","))]
    made = [Request(t, source.encode(), options) for t in found if (source := expert_source(t))]
    if not made:
        raise UsageError(f"no expert's task matches {pattern!r}; list the tasks with: python -m kbx_env tasks")
    return made


def cpu_seconds(pid: int) -> float:
    """Return the processor seconds of a process and its descendants, with those that have ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        below = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:  # it has just ended
        return 0.0
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK") + sum(cpu_seconds(int(p)) for p in below)


def rate(batch: list[Request], workers: int, seconds: float) -> dict[str, Any]:
    """Grade every request once, then all in turn for some seconds.

    Args:
        batch: the requests.
        workers: gradings at a time.
        seconds: the time.

    Returns:
        The figures, as plain JSON types.
    """
    pool = ProcessPool(workers)
    with Executor(pool, attempts=1) as executor:
        start = time.perf_counter()
        if not pool.ready(300):
            raise UsageError("the workers did not start within 300 s; see: python -m kbx_env doctor")
        warm = time.perf_counter() - start
        executor.grade_many(batch)
        load, spent = os.getloadavg(), cpu_seconds(os.getpid())
        start = time.perf_counter()
        turns = itertools.cycle(batch)
        ended: list[Outcome] = []
        flight: set[Future[Outcome]] = set()
        while time.perf_counter() < start + seconds:
            while len(flight) < 2 * workers:
                flight.add(executor.submit(next(turns)))
            done, flight = wait(flight, return_when=FIRST_COMPLETED)
            ended += [f.result() for f in done]
        wall = time.perf_counter() - start
        spent = cpu_seconds(os.getpid()) - spent
    took = [o.seconds["total"] for o in ended]
    stages = sorted({k for o in ended for k in o.seconds})
    return {
        "verdicts_per_second": round(len(ended) / wall, 2), "verdicts": len(ended), "seconds": round(wall, 1),
        "cpu_seconds_of_one": round(spent / len(ended), 3),
        "workers": workers, "cores": os.cpu_count(), "tasks": len(batch), "start_seconds": round(warm, 1),
        "seconds_of_one": [round(q, 3) for q in statistics.quantiles(took, n=4)] if len(took) > 1 else took,
        "mean_seconds_by_stage": {k: round(sum(o.seconds.get(k, 0) for o in ended) / len(ended), 4) for k in stages},
        "outcomes": dict(Counter(str(o.verdict) for o in ended)),
        "load_before": [round(x, 2) for x in load], "load_after": [round(x, 2) for x in os.getloadavg()],
    }  # fmt: skip


def profile(batch: list[Request], count: int) -> None:
    """Print the 40 functions of this process with the most cumulative time; work in the sandbox shows as waiting.

    Args:
        batch: the requests.
        count: gradings.
    """
    from kbx_env.grading.grader import Grader

    with Grader() as grader:
        for request in batch:
            grader.grade(request.task, request.source, **request.options)
        watch = cProfile.Profile()
        watch.enable()
        for request in itertools.islice(itertools.cycle(batch), count):
            grader.grade(request.task, request.source, **request.options)
        watch.disable()
    pstats.Stats(watch).sort_stats("cumulative").print_stats(40).sort_stats("tottime").print_stats(25)


def main() -> int:
    """Run the command."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--tasks", default="activation/*,math/*")
    p.add_argument("--workers", type=int, default=2)
    p.add_argument("--seconds", type=float, default=60.0)
    p.add_argument("--targets", default="", help="ahead-of-time targets, comma-separated (default: none)")
    p.add_argument("--profile", type=int, metavar="N")
    a = p.parse_args()
    try:
        batch = requests(a.tasks, [t for t in a.targets.split(",") if t])
        if a.profile:
            profile(batch, a.profile)
        else:
            print(json.dumps(rate(batch, a.workers, a.seconds), indent=1))
    except UsageError as e:
        print(f"cpu_rate.py: {e}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
