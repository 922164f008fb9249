"""Measure how often the grader rejects correct kernels: grade every expert with many new secret seeds (CPU backend).

python benchmarks/false_rejections.py OUT.json [--tasks GLOB] [--times N] [--workers N]
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from rich.progress import track

from kbx_env.spec.catalog import expert_source, task_ids


def grade_once(task: str) -> dict[str, Any]:
    """Grade an expert once; only outcomes other than ``correct`` are kept in full."""
    from kbx_env import grade

    outcome = grade(task, expert_source(task), backend="cpu", targets=())
    return {"task": task, "correct": outcome.correct, "message": outcome.message, "seconds": outcome.seconds["total"]}


def main() -> None:
    """Run the command; writes one row for each task."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--tasks", default="*")
    parser.add_argument("--times", type=int, default=50)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    chosen = [t for t in task_ids() if fnmatch(t, options.tasks)]
    jobs = [t for _ in range(options.times) for t in chosen]
    start = time.time()
    with multiprocessing.get_context("spawn").Pool(options.workers) as pool:
        rows = list(track(pool.imap_unordered(grade_once, jobs), total=len(jobs), description="grading"))
    table = []
    for task in chosen:
        own_rows = [r for r in rows if r["task"] == task]
        wrong = [r["message"] for r in own_rows if not r["correct"]]
        table.append({"task": task, "gradings": len(own_rows), "rejected": len(wrong), "messages": wrong[:10]})
    options.out.write_text(json.dumps({"seconds": time.time() - start, "tasks": table}, indent=1))
    for row in table:
        if row["rejected"]:
            print(f"{row['task']}: {row['rejected']} of {row['gradings']} rejected; {row['messages'][0]}")
    print(f"{sum(r['rejected'] for r in table)} of {len(rows)} gradings of right kernels were rejected")


if __name__ == "__main__":
    main()
