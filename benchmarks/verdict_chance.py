"""Grade experts, honest oddities and attacks many times each on the CPU tier, and list those whose verdict depends on chance.

    python benchmarks/verdict_chance.py OUT.json [--times N] [--seconds S] [--workers N] [--only GLOB] [--kinds KIND ...]

Each grading draws its inputs anew from a secret seed. A correct kernel that is refused once in a hundred gradings, and an attack
that is paid once in a hundred, are not seen when each is graded once. Exit status 1 if one was.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from kbx_env.eval.zoo import graded, specimen, specimens
from rich.progress import Progress

from kbx_env.executor.direct import retrying
from kbx_env.grading.grader import Grader
from kbx_env.spec.catalog import expert_source, task_ids

KINDS = ("expert", "honest", "attack")
MESSAGES = 20
"""Unexpected outcomes that are kept in full, of each kernel."""

_grader: list[Grader] = []


@dataclass(frozen=True)
class Kernel:
    """One kernel to grade.

    Attributes:
        kind: ``expert``, ``honest`` (an oddity of the zoo that must be paid) or ``attack``.
        name: task of an expert, or file of the zoo.
    """

    kind: str
    name: str


def kernels(kinds: Sequence[str], pattern: str) -> list[Kernel]:
    """Return the kernels that the CPU tier can judge.

    Args:
        kinds: of ``KINDS``.
        pattern: glob over names.

    Returns:
        Experts by task, then the zoo. Attacks that are known to pass on the CPU tier are left out.
    """
    found = [Kernel("expert", t) for t in task_ids()]
    for s in specimens():
        if s.backend != "cuda" and not s.open:
            found.append(Kernel("honest" if s.honest else "attack", f"{s.path.parent.name}/{s.path.name}"))
    return [k for k in found if k.kind in kinds and fnmatch(k.name, pattern)]


def grade_once(kernel: Kernel) -> dict[str, Any]:
    """Grade a kernel once.

    Args:
        kernel: the kernel.

    Returns:
        What it was judged, in plain JSON types.
    """
    if not _grader:
        _grader.append(Grader())
    if kernel.kind == "expert":
        out = retrying(_grader[0].grade)(kernel.name, expert_source(kernel.name), backend="cpu", targets=())
    else:
        zoo = Path(__file__).resolve().parent.parent / "tests" / "zoo"
        # The machine may be slower than the wall limit of an attack expects where every core is busy.
        out = graded(_grader[0], specimen(zoo / kernel.name), "cpu", wall=30.0)
    return {
        "kind": kernel.kind, "name": kernel.name, "correct": out.correct, "verdict": str(out.verdict), "message": out.message[:400],
        "rules": sorted({v.rule for v in out.violations}), "seconds": out.seconds.get("total"),
    }  # fmt: skip


def summary(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Count the gradings of each kernel.

    Args:
        rows: of ``grade_once``.

    Returns:
        For each kernel: ``gradings``, ``unexpected`` (a right kernel that is refused, an attack that is paid), ``messages`` of
        those, and how often each rule or verdict ended it (``ended``).
    """
    table: dict[tuple[str, str], dict[str, Any]] = {}
    for r in rows:
        own = table.setdefault(
            (r["kind"], r["name"]),
            {"kind": r["kind"], "name": r["name"], "gradings": 0, "unexpected": 0, "messages": [], "ended": Counter()},
        )
        own["gradings"] += 1
        own["ended"]["+".join(r["rules"]) or r["verdict"]] += 1
        if r["correct"] == (r["kind"] == "attack"):
            own["unexpected"] += 1
            own["messages"] = [*own["messages"], f"{r['verdict']}: {r['message']}"][:MESSAGES]
    return [table[key] for key in sorted(table)]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        argv: arguments, by default those of the command line.

    Returns:
        Exit status: 1 if a right kernel was refused or an attack paid.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--times", type=int, default=50, help="gradings of each kernel")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after these seconds")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--only", default="*", metavar="GLOB", help="tasks of experts, or exploits/NAME.py and honest/NAME.py")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    options = parser.parse_args(argv)
    chosen, start = kernels(options.kinds, options.only), time.time()
    if not chosen:
        print(f"verdict_chance: no kernel matches {options.only!r}; expected a task or exploits/NAME.py", file=sys.stderr)
        return 2
    # In rounds over all kernels, so that a run that is stopped has graded each about as often; shuffled, so that slow ones spread.
    order = random.Random(0)
    jobs = [k for _ in range(options.times) for k in order.sample(chosen, len(chosen))]
    # Set before torch starts in a worker: workers with a thread for every core keep each other from working.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    rows: list[dict[str, Any]] = []
    with multiprocessing.get_context("spawn").Pool(options.workers) as pool, Progress() as progress:
        bar = progress.add_task("grading", total=len(jobs))
        # An interrupted run tells what it has.
        with contextlib.suppress(KeyboardInterrupt):
            for r in pool.imap_unordered(grade_once, jobs):
                rows.append(r)
                progress.advance(bar)
                if time.time() - start > options.seconds:
                    break
        pool.terminate()
    table, took = summary(rows), time.time() - start
    options.out.write_text(json.dumps({"seconds": took, "kernels": table}, indent=1))
    for row in table:
        if row["unexpected"]:
            what = "paid" if row["kind"] == "attack" else "refused"
            print(f"{row['kind']} {row['name']}: {row['unexpected']} of {row['gradings']} {what}; {row['messages'][0]}")
    for kind in options.kinds:
        own = [r for r in table if r["kind"] == kind]
        count, wrong = sum(r["gradings"] for r in own), sum(r["unexpected"] for r in own)
        print(f"{kind}: {len(own)} kernels, {count} gradings, {wrong} {'paid' if kind == 'attack' else 'refused'}")
    print(f"{len(rows)} gradings in {took:.0f} s")
    return 1 if any(r["unexpected"] for r in table) else 0


if __name__ == "__main__":
    sys.exit(main())
