"""Grades many sources in one process tree, and checks that memory, descriptors, processes and files do not grow.

    python eval/soak.py [--count N] [--warm N] [--seed N] [--json FILE]

Grades experts and files of the zoo in turns. Prints, as JSON, the resident memory, file descriptors and processes of
this process and all below it, the entries of /dev/shm and the temporary files: before (after ``--warm`` gradings),
after, and at every tenth of the run. Exit status 1 if descriptors, processes or files were left.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kbx_env.eval.zoo import specimens
from rich.progress import Progress

from kbx_env.executor.direct import retrying
from kbx_env.grading.grader import Grader
from kbx_env.spec.catalog import expert_source, task_ids


def below(pid: int) -> list[int]:
    """Return the ids of a process and all its descendants, with ended ones that are not yet collected."""
    parents: dict[int, int] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                parents[int(entry)] = int(Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
    found, wave = [], {pid}
    while wave:
        found += sorted(wave)
        wave = {p for p, q in parents.items() if q in wave}
    return found


def resident(pid: int) -> float:
    """Return a process' resident memory in megabytes."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6
    except OSError:
        return 0.0


def descriptors(pid: int) -> int:
    """Return the number of a process' open file descriptors."""
    try:
        return len(os.listdir(f"/proc/{pid}/fd"))
    except OSError:
        return 0


def measured(grader: Grader) -> dict[str, Any]:
    """Return the present numbers, without what a killed process still holds for a moment."""
    zygote = grader.zygote()
    for _ in range(200):
        tree = below(os.getpid())
        if len(tree) <= 2:
            break
        time.sleep(0.02)
    return {
        "grader_mb": round(resident(tree[0]), 1), "others_mb": round(sum(map(resident, tree[1:])), 1),
        "descriptors": sum(map(descriptors, tree)), "processes": len(tree), "shm": len(os.listdir("/dev/shm")),
        "temporary": len([n for n in os.listdir(tempfile.gettempdir()) if n.startswith("kbx-")]),
        "runner_folders": len(os.listdir(zygote._folder)),
    }  # fmt: skip


def sources(seed: int) -> list[tuple[str, bytes]]:
    """Return (task, source) of experts and zoo, in a random order that the seed fixes."""
    found = [(t, text.encode()) for t in task_ids() if (text := expert_source(t))]
    found += [(s.task, s.path.read_bytes()) for s in specimens() if s.backend != "cuda"]
    random.Random(seed).shuffle(found)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Grade and compare, as the top of this file describes; return the exit status."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--count", type=int, default=300)
    p.add_argument(
        "--warm", type=int, default=20, help="gradings before the first measurement: modules are loaded then"
    )
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--wall", type=float, default=3.0)
    p.add_argument("--json", type=Path, metavar="FILE")
    a = p.parse_args(argv)
    # Temporary files of other processes must not be counted.
    with tempfile.TemporaryDirectory(prefix="soak-") as folder, Grader() as grader, Progress() as bar:
        tempfile.tempdir = folder
        workload, verdicts, course = sources(a.seed), Counter[str](), []
        line = bar.add_task("soaking", total=a.warm + a.count)
        for k in range(a.warm + a.count):
            if k == a.warm:
                start, began = measured(grader), time.perf_counter()
            task, data = workload[k % len(workload)]
            outcome = retrying(grader.grade)(task, data, backend="cpu", targets=(), wall=a.wall)
            verdicts[str(outcome.verdict)] += 1
            if k >= a.warm and (k - a.warm + 1) % max(1, a.count // 10) == 0:
                course.append({"gradings": k - a.warm + 1} | measured(grader))
            bar.advance(line)
        end, seconds = measured(grader), time.perf_counter() - began
        tempfile.tempdir = None
    kept = ("descriptors", "processes", "shm", "temporary", "runner_folders")
    grown = {k: end[k] - start[k] for k in start}
    result = {
        "gradings": a.count, "seconds": round(seconds, 1), "start": start, "end": end, "grown": grown,
        "verdicts": dict(verdicts), "course": course,
    }  # fmt: skip
    print(json.dumps(result, indent=1))
    if a.json:
        a.json.write_text(json.dumps(result, indent=1))
    return 1 if any(grown[k] > 0 for k in kept) else 0


if __name__ == "__main__":
    sys.exit(main())
