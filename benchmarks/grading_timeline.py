"""Record when each step of a grading begins and ends, one grading after the other, with nothing beside it, on a GPU.

    python benchmarks/grading_timeline.py OUT.json [--tasks math/softmax,reduce/sum] [--turns 2] [--seconds 90]
    python benchmarks/grading_timeline.py --show OUT.json --task math/softmax [--least 0.02]

One ``Grader`` grades the expert of each task several times with timing in training precision; a first grading of each task, which
loads torch's kernels, is not recorded. OUT has the steps of every grading: name, thread, begin and end in seconds. ``--show``
prints those of the last grading of a task that take at least so many seconds.

Workers of a pool have glibc keep freed memory; to compare with them, set the variables of ``ALLOCATOR`` in
``kbx_env/grading/runtime/zygote_process.py``.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from kbx_env import versions
from kbx_env.errors import UsageError
from kbx_env.grading import context, pipeline, speculative_compile
from kbx_env.grading.grader import Grader
from kbx_env.grading.runtime import compiler_client, engine_client, session
from kbx_env.grading.timing import contestants, measuring, task_timing
from kbx_env.options import resolve_backend
from kbx_env.spec.catalog import expert_source

TASKS = (
    "activation/relu", "loss/smooth_l1_loss", "index/masked_select", "normalization/batch_norm", "matrixmultiply/matmul",
    "math/softmax", "reduce/sum",
)  # fmt: skip
Step = tuple[str, str, float, float]
"""Name, thread, begin and end, in seconds of ``time.perf_counter``."""


def watch(steps: list[Step]) -> None:
    """Record the steps of all gradings of this process, for good.

    Args:
        steps: receives them when they end.
    """

    def add(owner: Any, attribute: str, name: str | Callable[..., str]) -> None:
        found = owner.__dict__[attribute] if isinstance(owner, type) else getattr(owner, attribute)
        real = found.__func__ if isinstance(found, staticmethod) else found

        @functools.wraps(real)
        def recorded(*args: Any, **more: Any) -> Any:
            step = name if isinstance(name, str) else name(*args, **more)
            began = time.perf_counter()
            try:
                return real(*args, **more)
            finally:
                steps.append((step, threading.current_thread().name, began, time.perf_counter()))

        setattr(owner, attribute, staticmethod(recorded) if isinstance(found, staticmethod) else recorded)

    def command(asked: session.RunnerSession, header: dict[str, Any], *more: Any) -> str:
        return f"{asked.backend} runner: {header.get('op', 'answer')} {header.get('do', header.get('mode', ''))}".rstrip()

    for stage in pipeline.STAGES:
        add(type(stage), "run", lambda self, of, **_: f"{of.backend} stage: {type(self).__name__}")
    add(session.RunnerSession, "_ask", command)
    for method in ("select_cases", "open_session", "judge", "close"):
        add(context.GradingContext, method, functools.partial(lambda method, of, *_, **__: f"{of.backend} {method}", method))
    add(engine_client.Engine, "call", "engine: call")
    add(compiler_client.KernelCompiler, "compile", "compile to TTIR")
    add(speculative_compile.SpeculativeCompile, "await_end", "wait for the compile stage")
    for function in ("_load_reference", "_counted", "_drawn_early", "case_time"):
        add(task_timing, function, f"timing: {function}")
    add(measuring.Measuring, "run", "timing: the GPU is held alone")
    add(measuring.Measuring, "_case", "timing: measure a case")
    add(contestants.RunnerContestant, "rule", "timing: judge a result")


def record(tasks: Sequence[str], turns: int, seconds: float) -> list[dict[str, Any]]:
    """Grade, print and return a row for each recorded grading.

    Args:
        tasks: their experts are graded.
        turns: recorded gradings of each.
        seconds: after which no grading begins.

    Returns:
        One row for each recorded grading, with its steps.

    Raises:
        UsageError: a task has no expert.
    """
    steps: list[Step] = []
    watch(steps)
    rows: list[dict[str, Any]] = []
    began = time.monotonic()
    options: dict[str, Any] = {"backend": "cuda", "targets": (), "timing": True, "precision": "training"}
    with Grader() as grader:
        for task in tasks:
            source = expert_source(task)
            if source is None:
                raise UsageError(f"no expert for {task}; --tasks takes names such as activation/relu")
            grader.grade(task, source, **options)
            for _ in range(turns):
                if time.monotonic() - began > seconds:
                    return rows
                time.sleep(0.5)  # the runner of this grading gets ready
                steps.clear()
                start = time.perf_counter()
                outcome = grader.grade(task, source, **options)
                took = time.perf_counter() - start
                found = [(n, thread, round(b - start, 4), round(e - start, 4)) for n, thread, b, e in sorted(steps, key=_begin)]
                rows.append({"task": task, "verdict": str(outcome.verdict), "took": round(took, 4),
                             "seconds": dict(outcome.seconds), "steps": found})  # fmt: skip
                stages = ", ".join(f"{k} {v:.2f}" for k, v in outcome.seconds.items() if v >= 0.05)
                print(f"{task} ({outcome.verdict}): {took:.2f} s: {stages}", flush=True)
    return rows


def _begin(step: Step) -> float:
    return step[2]


def show(file: Path, task: str, least: float) -> None:
    """Print the steps of the last grading of a task."""
    try:
        rows = [r for r in json.loads(file.read_text())["rows"] if r["task"] == task]
    except (OSError, ValueError, LookupError, TypeError) as e:
        raise UsageError(f"{file} is no file that grading_timeline.py has written ({type(e).__name__})") from None
    if not rows:
        raise UsageError(f"{file} has no grading of {task}")
    print(f"{task}: {rows[-1]['took']} s\n   begin      end     took  thread")
    for name, thread, begin, end in rows[-1]["steps"]:
        if end - begin >= least:
            print(f"{begin:8.3f} {end:8.3f} {end - begin:8.3f}  {thread[:11]:12}{name}")


def main() -> int:
    """Record or show; exit status 2 for wrong arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, nargs="?", metavar="OUT.json")
    parser.add_argument("--tasks", default=",".join(TASKS))
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=90.0, help="after which no grading begins (default: 90)")
    parser.add_argument("--show", type=Path, metavar="OUT.json")
    parser.add_argument("--task", default="math/softmax")
    parser.add_argument("--least", type=float, default=0.02, help="seconds of the shortest step that is shown (default: 0.02)")
    a = parser.parse_args()
    try:
        if a.show is not None:
            show(a.show, a.task, a.least)
            return 0
        if a.out is None:
            raise UsageError("which file gets the result? Name it: grading_timeline.py OUT.json")
        if resolve_backend("auto") != "cuda":
            raise UsageError("the gradings need a GPU, and torch finds none here")
        rows = record(a.tasks.split(","), a.turns, a.seconds)
    except UsageError as e:
        print(f"grading_timeline.py: {e}", file=sys.stderr)
        return 2
    result = {"environment": versions.environment("cuda"), "precision": "training", "rows": rows}
    a.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0 if all(r["verdict"] == "correct" for r in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
