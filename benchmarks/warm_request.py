"""Measure one request after the other, with nothing beside it: how long a user waits for the verdict on a kernel that is right.

    python benchmarks/warm_request.py OUT.json [--workers 14] [--tasks activation/relu,math/softmax] [--turns 4] [--pause 1]
                                      [--no-timing] [--precision training|report]

A pool of idle workers, or one ``Grader`` (``--workers 0``), grades the expert of each task several times, on a GPU. The first turn
loads torch's kernels, so it is left out of the median. OUT has the seconds of each stage and, of one ``Grader``, of each kind of
command to the runner.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import functools
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from kbx_env import versions
from kbx_env.errors import UsageError
from kbx_env.executor.pools.process import InlinePool, ProcessPool, Request, WorkerPool
from kbx_env.grading.grader import Grader
from kbx_env.grading.runtime.session import RunnerSession
from kbx_env.options import PRECISIONS, resolve_backend
from kbx_env.spec.catalog import expert_source

TASKS = (
    "activation/relu", "loss/smooth_l1_loss", "index/masked_select", "normalization/batch_norm", "matrixmultiply/matmul",
    "math/softmax", "reduce/sum", "fusion/fused_silu_layer_norm_conv2d",
)  # fmt: skip
READY_SECONDS, DEADLINE = 120.0, 300.0
"""Seconds until all workers must be warm, and for one grading."""


def watch_commands() -> dict[str, float]:
    """Count the seconds for which graders of this process wait for their runners, by command.

    Returns:
        The seconds, which go on counting, by device, command, and for timing what it does.
    """
    seconds: dict[str, float] = collections.defaultdict(float)
    real = RunnerSession._ask

    @functools.wraps(real)
    def asked(session: RunnerSession, header: dict[str, Any], *more: Any) -> Any:
        name = f"{session.backend}: {header.get('op', 'answer')} {header.get('do', header.get('mode', ''))}".strip()
        began = time.perf_counter()
        try:
            return real(session, header, *more)
        finally:
            seconds[name] += time.perf_counter() - began

    RunnerSession._ask = asked  # type: ignore[method-assign, assignment]
    return seconds


def main() -> int:
    """Grade, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--tasks", default=",".join(TASKS))
    parser.add_argument("--workers", type=int, default=14, help="of the pool; 0: one Grader in this process (default: 14)")
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--pause", type=float, default=1.0, help="seconds between an outcome and the next request (default: 1)")
    parser.add_argument("--no-timing", action="store_true")
    parser.add_argument("--precision", choices=PRECISIONS, default="training")
    a = parser.parse_args()
    try:
        if resolve_backend("auto") != "cuda":
            raise UsageError("the requests need a GPU, and torch finds none here")
        if a.workers < 0 or a.pause < 0:
            raise UsageError(f"--workers and --pause take 0 or more, not {a.workers} and {a.pause:g}")
        if a.turns < 2:
            raise UsageError(f"--turns takes 2 or more, not {a.turns}: the first turn is left out")
        sources = {t: expert_source(t) for t in a.tasks.split(",")}
        if missing := [t for t, s in sources.items() if s is None]:
            raise UsageError(f"no expert for {', '.join(missing)}; --tasks takes names such as activation/relu")
    except UsageError as e:
        print(f"warm_request.py: {e}", file=sys.stderr)
        return 2
    commands, rows = watch_commands(), list[dict[str, Any]]()
    options = {"backend": "cuda", "targets": (), "timing": not a.no_timing, "precision": a.precision}
    with contextlib.ExitStack() as stack:
        pool: WorkerPool
        if a.workers:
            pool = processes = ProcessPool(a.workers)
            stack.callback(processes.close)
            if not processes.ready(READY_SECONDS):
                print(f"warm_request.py: the workers did not start within {READY_SECONDS:.0f} s; see: kbx doctor", file=sys.stderr)
                return 1
        else:
            pool = InlinePool(stack.enter_context(Grader()).grade)
        for task, source in sources.items():
            for turn in range(1, a.turns + 1):
                commands.clear()
                began = time.perf_counter()
                outcome = pool.grade(Request(task, (source or "").encode(), options), DEADLINE)
                took = time.perf_counter() - began
                asked = {k: round(v, 4) for k, v in sorted(commands.items(), key=lambda row: -row[1])}
                rows.append({"task": task, "turn": turn, "verdict": str(outcome.verdict), "took": round(took, 4),
                             "seconds": dict(outcome.seconds), "commands": asked})  # fmt: skip
                result = {"environment": versions.environment("cuda"), "workers": a.workers, "pause": a.pause, "rows": rows}
                a.out.write_text(json.dumps(result, indent=1) + "\n")
                time.sleep(a.pause)
            ours = [r for r in rows if r["task"] == task and r["turn"] > 1]
            each = ", ".join(f"{r['took']:.2f}" for r in ours)
            stages = ", ".join(f"{k} {v:.2f}" for k, v in ours[-1]["seconds"].items() if v >= 0.05)
            waited = ", ".join(f"{k} {v:.2f}" for k, v in ours[-1]["commands"].items() if v >= 0.05)
            print(f"{task} ({ours[-1]['verdict']}): {each} s\n  stages: {stages}\n  commands: {waited or '-'}", flush=True)
    median = statistics.median(r["took"] for r in rows if r["turn"] > 1)
    print(f"median of all turns but the first: {median:.2f} s")
    return 0 if all(r["verdict"] == "correct" for r in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
