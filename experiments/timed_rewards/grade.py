"""Step 1, on a GPU: grade every answer of the study with timing, once at training sizes and once at held-out sizes, then again.

    python experiments/timed_rewards/grade.py OUT.jsonl [--workers 12] [--seconds 150] [--rounds 2] [--tasks GLOB] [--dry]

Correct kernels are timed in training precision. A kernel with faults is wrong with any schedule, so that only the project's own
schedule is graded with each set of faults, once. The order is by what the study needs first: of each schedule both sizes, tasks in
turn, and the second round last. Each line of OUT.jsonl is one grading; OUT.sqlite keeps the whole outcomes. The same command
continues a run that was stopped or reached ``--seconds``. ``--dry`` prints the gradings that are missing and starts none.

The exit status is 0 if nothing is missing, 1 if something is, 2 on bad usage (also on a machine without a GPU).
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import itertools
import math
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # run as a script from a clone
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from kbx_env.rewards.compose import load_preset

from experiments.timed_rewards.answers import HELD_OUT, SPACES, Answer
from kbx_env import jsonl, versions
from kbx_env.deadlines import deadline_of
from kbx_env.errors import UsageError
from kbx_env.executor import Executor, Request, WorkerPool
from kbx_env.executor.pools.gpu import gpu_pool, uuids_of
from kbx_env.options import SIZES
from kbx_env.outcome import Outcome, Verdict
from kbx_env.spec.catalog import load_task
from kbx_env.store import Store

PUBLISHED, HELD = SIZES
"""Sizes of training and of evaluation."""
PRESET = "default"
"""The preset whose reward a row has."""
POLICY = "timed_rewards"
"""Name of the policy under which the store keeps gradings."""


@dataclass(frozen=True)
class Grading:
    """One grading: an answer, the sizes at which it is timed, and the number of the measurement."""

    answer: Answer
    sizes: str
    round: int

    @property
    def key(self) -> tuple[Any, ...]:
        """What identifies its row."""
        return self.answer.task, self.answer.schedule, self.answer.faults, self.sizes, self.round

    def request(self, about: Mapping[str, str]) -> Request:
        """Return the request for the executor.

        Args:
            about: the environment, for the key of the store.

        Returns:
            The request. Each round has a seed of its own: equal contents in progress would share one grading, and equal
            contents in the store would not be measured again.
        """
        options = {
            "backend": "cuda", "targets": ("sm_90",), "timing": True, "precision": "training", "sizes": self.sizes,
            "split": "train", "seed": self.round,
        }  # fmt: skip
        about = {**about, "fingerprint": load_task(self.answer.task).fingerprint}
        return Request(self.answer.task, self.answer.source.encode(), options, about, POLICY, self.round)

    def row(self, outcome: Outcome) -> dict[str, Any]:
        """Return the line of OUT.jsonl."""
        timing = outcome.timing
        cases = [
            {"case": c.case, "speedup": c.speedup, "eager_us": c.eager_us, "candidate_us": c.candidate_us, "void": c.void}
            for c in (timing.cases if timing else ())
        ]
        return {
            "task": self.answer.task, "schedule": list(self.answer.schedule), "faults": self.answer.faults, "sizes": self.sizes,
            "round": self.round, "verdict": str(outcome.verdict), "reward": load_preset(PRESET)(outcome),
            "speedup": timing.speedup if timing else None, "low": timing.low if timing else None,
            "high": timing.high if timing else None, "cases": cases, "message": outcome.message[:300],
            "seconds": dict(outcome.seconds), "device": timing.device if timing else None,
        }  # fmt: skip


def plan(tasks: Sequence[str], rounds: int, seed: int = 0) -> list[Grading]:
    """Return all gradings, the most informative first.

    Args:
        tasks: keys of ``SPACES``.
        rounds: measurements of each timed answer.
        seed: seed of the order of schedules; the project's own comes first.

    Returns:
        First every schedule at both sizes, tasks in turn, with the faulty kernels after the first schedule of each task; then
        the timed answers again. A task that GRPO does not ask for is timed at held-out sizes only.
    """
    orders = []
    for task in tasks:
        own, *others = SPACES[task].schedules()
        random.Random(f"{seed} {task}").shuffle(others)
        orders.append([Answer(task, schedule) for schedule in (own, *others)])
    in_turn = [a for some in itertools.zip_longest(*orders) for a in some if a is not None]
    faulty = [Answer(t, SPACES[t].schedules()[0], f) for t in tasks for f in range(1, 1 << len(SPACES[t].faults))]
    found = list[Grading]()
    for k in range(rounds):
        timed = [Grading(a, s, k) for a in in_turn for s in (PUBLISHED, HELD) if s == HELD or a.task not in HELD_OUT]
        first = sum(1 if t in HELD_OUT else 2 for t in tasks)
        found += timed[:first] + ([Grading(a, PUBLISHED, 0) for a in faulty] if k == 0 else []) + timed[first:]
    return found


def missing(gradings: Sequence[Grading], out: Path) -> list[Grading]:
    """Return the gradings that a file does not have yet; an infrastructure fault does not count."""
    known = set()
    if out.is_file():
        for r in jsonl.read(out, skip_broken=True):
            if r["verdict"] != Verdict.INFRA_FAULT:
                known.add((r["task"], tuple(r["schedule"]), r["faults"], r["sizes"], r["round"]))
    return [g for g in gradings if g.key not in known]


def run(
    gradings: Sequence[Grading], out: Path, pool: WorkerPool, about: Mapping[str, str], seconds: float
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """Grade, and write each row as its grading ends.

    Args:
        gradings: to do, in this order.
        out: the file; rows are appended.
        pool: runs the gradings, and is closed.
        about: the environment, for the keys of the store.
        seconds: gradings that have not ended after so many seconds are given up.

    Yields:
        The rows.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    with (
        contextlib.closing(Store(out.with_suffix(".sqlite"))) as store,
        Executor(pool, store=store, deadline=deadline_of(True), capacity=sys.maxsize) as executor,
    ):
        flight: dict[Future[Outcome], Grading] = {executor.submit(g.request(about)): g for g in gradings}
        while flight and (left := seconds - (time.monotonic() - start)) > 0:
            for job in wait(flight, timeout=min(left, 86_400.0), return_when=FIRST_COMPLETED).done:
                row = flight.pop(job).row(job.result())
                jsonl.append(out, row)
                yield row
        for job in flight:
            job.cancel()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; exit status 0 if nothing is missing, 1 if something is, 2 on bad usage."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("out", type=Path, metavar="OUT.jsonl")
    p.add_argument("--workers", type=int, default=12, help="gradings at a time")
    p.add_argument("--seconds", type=float, default=math.inf, help="give up what has not ended after so many seconds")
    p.add_argument("--rounds", type=int, default=2, help="measurements of each timed answer")
    p.add_argument("--tasks", default="*", help="comma-separated patterns of the study's tasks")
    p.add_argument("--dry", action="store_true", help="print what is missing, and start nothing")
    a = p.parse_args(argv)
    tasks = [t for t in SPACES if any(fnmatch.fnmatch(t, pattern.strip()) for pattern in a.tasks.split(","))]
    try:
        if not tasks:
            raise UsageError(f"--tasks {a.tasks!r} matches none of {', '.join(SPACES)}")
        if min(a.workers, a.rounds) < 1 or not a.seconds > 0:
            raise UsageError("--workers and --rounds are at least 1, --seconds above 0")
        if a.out.suffix != ".jsonl":
            raise UsageError(f"{a.out}: the name of the file ends in .jsonl")
        todo = missing(plan(tasks, a.rounds), a.out)
        if a.dry:
            for g in todo:
                print(f"{g.answer.task} schedule {g.answer.schedule} faults {g.answer.faults} {g.sizes} round {g.round}")
            print(f"{len(todo)} gradings are missing")
            return 0 if not todo else 1
        if not torch.cuda.is_available():
            raise UsageError("this step times kernels and needs a GPU, but torch finds no CUDA device; --dry prints the plan")
        pool = gpu_pool(1, a.workers, uuids=uuids_of(1))
        about = versions.environment("cuda")
    except UsageError as e:
        print(f"grade.py: {e}", file=sys.stderr)
        return 2
    start, rows = time.monotonic(), list[dict[str, Any]]()
    for row in run(todo, a.out, pool, about, a.seconds):
        rows.append(row)
        speed = "" if row["speedup"] is None else f", {row['speedup']:.3f} times as fast as eager"
        what = f"{row['task']} {tuple(row['schedule'])} faults {row['faults']} {row['sizes']} round {row['round']}"
        print(f"{time.monotonic() - start:5.0f} s {len(rows):3d} of {len(todo)}: {what}: {row['verdict']}{speed}", flush=True)
    left = missing(todo, a.out)
    print(f"{dict(Counter(r['verdict'] for r in rows))}; {len(left)} gradings are missing")
    if alone := [r["seconds"]["alone"] for r in rows if "alone" in r["seconds"]]:
        print(f"GPU held alone: {statistics.fmean(alone):.2f} s for a timed grading, {sum(alone):.0f} s in all")
    return 0 if not left else 1


if __name__ == "__main__":
    sys.exit(main())
