"""Measure what judging timed results costs on a quiet GPU: seconds of each step for every timed case, and how busy the GPU is.

    python benchmarks/judge_costs.py OUT.jsonl [--tasks 'math/*,reduce/*'] [--count N] [--seed S] [--seconds S]

One process, nothing beside it. Each line of OUT is one timed case of a task, with wall seconds to draw its values, to cut the
arguments of one call from them, to evaluate the reference in the declared dtypes and in fp64, and to judge torch's own answer as
if a submission had given it; ``busy`` is the device time of the kernels of that last step. A grading holds the GPU lock for these
steps, so a step that leaves the GPU idle keeps others waiting for nothing.
"""

from __future__ import annotations

import argparse
import fnmatch
import random
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
if __package__ in (None, ""):
    sys.path.insert(0, str(ROOT))

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from kbx_env import jsonl
from kbx_env.grading import compulsory_work, reference
from kbx_env.grading import judge as judges
from kbx_env.grading.sizes import timed
from kbx_env.grading.timing import input_windows
from kbx_env.grading.timing.input_windows import InputWindows
from kbx_env.spec.catalog import load_task, task_ids
from kbx_env.spec.task import Case, Task


def _seconds(work: Callable[[], Any]) -> tuple[float, Any]:
    """Return the wall seconds of some work with the GPU drained before and after, and its result."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    done = work()
    torch.cuda.synchronize()
    return time.perf_counter() - began, done


def _busy_seconds(work: Callable[[], Any]) -> float:
    """Return the device seconds of the kernels and copies that some work launches."""
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        work()
        torch.cuda.synchronize()
    return sum(e.time_range.elapsed_us() for e in seen.events() or () if e.device_type == DeviceType.CUDA) / 1e6


def costs(task: Task, case: Case) -> dict[str, Any]:
    """Measure one timed case.

    Args:
        task: the task.
        case: one of its timed cases.

    Returns:
        A JSON object; times in seconds.
    """
    rng, seeds = random.Random(0), list(range(input_windows.MAX_DRAWS))
    draw, windows = _seconds(lambda: InputWindows.draw(task, case, seeds, "cuda"))
    window = windows.pick(rng)
    cut, args = _seconds(lambda: windows.args(window))
    first, _ = _seconds(lambda: reference.expect(task, case, args, "cuda", exact=False))
    native, own = _seconds(lambda: reference.expect(task, case, args, "cuda", exact=False))
    sent = {k: v for k, v in args.items() if isinstance(v, torch.Tensor)}
    after = {**sent, **own.native_written}
    strides = tuple(tuple(o.stride()) for o in own.native)
    answer = judges.Answer(
        own.native, own.is_tuple, after, own.aliases, own.shares, strides=strides, grads=tuple(False for _ in own.native)
    )  # fmt: skip
    exact, _ = _seconds(lambda: reference.expect(task, case, args, "cuda"))

    def rule() -> Any:
        answers = [answer] * judges.calls_needed(task, case)
        return judges.judge(task, case, args, answers, timed=True, device="cuda", generator_seeds=[0, 0, 1])

    judged, ruling = _seconds(rule)
    again, _ = _seconds(rule)
    return {
        "task": task.id, "case": case.label(), "criterion": type(task.truth).__name__,
        "input_bytes": compulsory_work.input_bytes(task, case), "draw": draw, "cut": cut, "native_first": first,
        "native": native, "both": exact, "judge_first": judged, "judge": again, "busy": _busy_seconds(rule),
        "passed": ruling.passed, "reason": ruling.reason,
    }  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; exit status 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT.jsonl")
    parser.add_argument("--tasks", default="*", help="comma-separated patterns of task ids, measured in this order")
    parser.add_argument("--count", type=int, default=1000, help="tasks at most")
    parser.add_argument("--seed", type=int, default=0, help="of the order of tasks that one pattern matches")
    parser.add_argument("--seconds", type=float, default=60.0, help="after which no task begins")
    a = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("judge_costs.py: it measures a CUDA GPU, and there is none", file=sys.stderr)
        return 2
    every = list(task_ids())
    random.Random(a.seed).shuffle(every)
    chosen = dict.fromkeys(t for p in a.tasks.split(",") for t in every if fnmatch.fnmatch(t, p.strip()))
    began, memory = time.monotonic(), torch.cuda.get_device_properties(0).total_memory
    with a.out.open("w") as out:
        for name in list(chosen)[: a.count]:
            if time.monotonic() - began > a.seconds:
                break
            task = load_task(name)
            for case in compulsory_work.fitting(task, memory, timed(task, "published")):
                try:
                    row = costs(task, case)
                except Exception as e:  # the next case may still be measured
                    row = {"task": name, "case": case.label(), "error": f"{type(e).__name__}: {e}"[:300]}
                out.write(jsonl.encode(row))
                out.flush()
                torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
