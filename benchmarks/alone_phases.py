"""Measure how one grading spends its exclusive time on the GPU, which limits verdicts a second where kernels are timed.

python benchmarks/alone_phases.py OUT.json [--tasks activation/relu,reduce/sum,linearalgebra/solve] [--turns 2]
                                  [--precision report|training]

The expert of each task is graded with timing, several times in one process; in the first turn torch loads its kernels. The result
has each step's own seconds, without those of the steps within it, and how often it ran.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import functools
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from kbx_env import versions
from kbx_env.errors import UsageError
from kbx_env.grading import reference
from kbx_env.grading.grader import Grader
from kbx_env.grading.timing import contestants, gpu_lock, input_windows, measuring, roofline, telemetry
from kbx_env.options import PRECISIONS, resolve_backend
from kbx_env.spec.catalog import expert_source

Name = str | Callable[..., str]


class Phases:
    """Own seconds and number of runs of each step while the GPU is held exclusively."""

    def __init__(self) -> None:
        self.seconds, self.runs = collections.Counter[str](), collections.Counter[str]()
        self._within: list[float] = []
        self._alone = False

    def watch(self, owner: Any, attribute: str, name: Name) -> None:
        """Replace a function by one that is measured.

        Args:
            owner: module or class of the function.
            attribute: its name there.
            name: name of the step.
        """
        real = getattr(owner, attribute)

        @functools.wraps(real)
        def measured(*args: Any, **more: Any) -> Any:
            if not self._alone:
                return real(*args, **more)
            step = name if isinstance(name, str) else name(*args, **more)
            began = time.perf_counter()
            self._within.append(0.0)
            try:
                return real(*args, **more)
            finally:
                took = time.perf_counter() - began
                self.seconds[step] += took - self._within.pop()
                self.runs[step] += 1
                if self._within:
                    self._within[-1] += took

        setattr(
            owner, attribute, staticmethod(measured) if owner is input_windows.InputWindows else measured
        )

    def watch_all(self) -> None:
        """Measure the steps of a timing."""
        self.watch(contestants.RunnerContestant, "_ask", lambda side, header, *a, **k: f"runner: {header['do']}")
        for method in ("__init__", "prepare", "shuffle", "measure"):
            self.watch(contestants.EagerContestant, method, f"eager: {method.strip('_')}")
        self.watch(contestants.RunnerContestant, "fetch", "results, the grader's part")
        self.watch(contestants.RunnerContestant, "lay", "inputs, the grader's part")
        self.watch(measuring, "pair", "pairs, the grader's part")
        self.watch(measuring, "give_back", "memory given back")
        self.watch(measuring.Measuring, "_preallocate", "memory asked for")
        self.watch(reference, "expect", "reference")
        self.watch(telemetry.Telemetry, "read", "telemetry")
        self.watch(roofline, "roofline", "ceilings")
        self.watch(input_windows.InputWindows, "draw", "values drawn")
        real = gpu_lock.GpuHold.alone

        @contextlib.contextmanager
        def alone(hold: gpu_lock.GpuHold, quiet: bool = True) -> Iterator[None]:
            with real(hold, quiet):
                began, self._alone = time.perf_counter(), True
                try:
                    yield
                finally:
                    self._alone = False
                    self.seconds["in all"] += time.perf_counter() - began

        gpu_lock.GpuHold.alone = alone  # type: ignore[method-assign, assignment]

    def take(self) -> dict[str, dict[str, float]]:
        """Return the figures since the last call, the longest step first."""
        found = {k: {"seconds": round(v, 4), "runs": self.runs[k]} for k, v in self.seconds.most_common()}
        self.seconds.clear()
        self.runs.clear()
        return found


def main() -> int:
    """Grade, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--tasks", default="activation/relu,reduce/sum,linearalgebra/solve,convolution/conv2d")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--precision", choices=PRECISIONS, default="report")
    a = parser.parse_args()
    try:
        if resolve_backend("auto") != "cuda":
            raise UsageError("kernels are timed on a GPU, and torch finds none here")
        sources = {t: expert_source(t) for t in a.tasks.split(",")}
        if missing := [t for t, s in sources.items() if s is None]:
            raise UsageError(f"no expert for {', '.join(missing)}; --tasks takes names such as activation/relu")
    except UsageError as e:
        print(f"alone_phases.py: {e}", file=sys.stderr)
        return 2
    phases, rows = Phases(), list[dict[str, Any]]()
    phases.watch_all()
    with Grader() as grader:
        for task, source in sources.items():
            for turn in range(1, a.turns + 1):
                outcome = grader.grade(task, source or "", backend="cuda", targets=(), precision=a.precision)
                pairs = [c.pairs for c in outcome.timing.cases] if outcome.timing else None
                rows.append({"task": task, "turn": turn, "verdict": str(outcome.verdict), "pairs": pairs,
                             "seconds": dict(outcome.seconds), "alone": phases.take()})  # fmt: skip
                a.out.write_text(
                    json.dumps({"environment": versions.environment("cuda"), "rows": rows}, indent=1) + "\n"
                )
                print(f"{task}, turn {turn}: {outcome.verdict} {outcome.message[:100]}")
                for step, row in rows[-1]["alone"].items():
                    print(f"  {1e3 * row['seconds']:9.1f} ms {row['runs']:5.0f} x {step}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
