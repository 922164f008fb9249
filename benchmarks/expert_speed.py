"""Measure every expert on one GPU: its verdict, and its speed beside torch eager and torch.compile.

    python benchmarks/expert_speed.py OUT_FOLDER [--tasks GLOB] [--shard 1/2] [--workers 12] [--compile]
                                      [--parts grade,speed]

``grade`` grades without timing, several tasks at a time. ``speed`` times each timed case in this process with the grader's
stopwatch, expert and eager in turn, after the result at the timed size was judged. That takes a third of the time of the grader's
own timing, and leaves out its protection against dishonest kernels, which our experts do not need. ``--compile`` also times
torch.compile of the eager baseline at the largest size, after worker processes have filled its cache.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import math
import multiprocessing
import statistics
import sys
import tempfile
import time
import traceback
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import triton

from kbx_env.device.driver import keep_suballocation_blocks
from kbx_env.device.stopwatch import Stopwatch
from kbx_env.grading import inputs, judge, reference
from kbx_env.protocol.wire import assembled
from kbx_env.spec.catalog import expert_source, load_task, load_tasks
from kbx_env.spec.task import GeneratorArg

ROUNDS, BLOCK = 8, 3
"""Turns of each side, and calls of one turn."""
SLOW_US = 20_000.0
"""A call that takes longer is timed in a single turn."""
COMPILE_SECONDS = 60


_GRADER: Any = None


def graded(task_id: str) -> dict[str, Any]:
    """Grade a task's expert and return the row; each worker process keeps one grader."""
    global _GRADER
    from kbx_env.grading.grader import Grader

    start = time.perf_counter()
    try:
        _GRADER = _GRADER or Grader()
        source = expert_source(task_id) or ""
        row = _GRADER.grade(task_id, source, backend="cuda", targets=(), timing=False, wall=120.0).to_dict()
    except Exception:
        row = {"verdict": "exception", "correct": False, "message": traceback.format_exc()[-1500:]}
    return row | {"task": task_id, "wall_seconds": round(time.perf_counter() - start, 2)}


def load(task_id: str) -> Any:
    """Import a task's expert into this process and return its entry function."""
    path = Path(tempfile.mkdtemp()) / (task_id.split("/")[-1] + ".py")
    path.write_text(expert_source(task_id) or "")
    spec = importlib.util.spec_from_file_location("expert_" + task_id.replace("/", "_"), path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, load_task(task_id).entry)


class Timer:
    """One side of a comparison."""

    def __init__(self, function: Any) -> None:
        self.watch, self.function = Stopwatch("cuda"), function
        keep_suballocation_blocks()  # as in a grading

    def prepare(self, args: dict[str, Any], n: int) -> None:
        """Make ``n`` copies of the inputs ``args`` and warm up."""
        slots = [reference.resolve(args, "cuda", generator_seed=i) for i in range(n)]
        with reference.exact_matmul():
            self.watch.prepare(lambda s: self.function(**assembled(s)), slots)

    def measure(self, order: list[int]) -> list[float]:
        """Call the copies in an order and return the device microseconds of each call."""
        with reference.exact_matmul():
            return [float(u) for u in self.watch.measure({"order": order})["us"]]


def timed(task: Any, case: Any, args: dict[str, Any], sides: dict[str, Any]) -> dict[str, Any]:
    """Time one case.

    Args:
        task: the task.
        case: the case.
        args: its inputs.
        sides: the functions to time, by name.

    Returns:
        Microseconds by side, and whether the expert's result is correct.
    """
    row: dict[str, Any] = {"case": case.label()}
    size = sum(v.numel() * v.element_size() for v in args.values() if isinstance(v, torch.Tensor))
    n = 2 if size < 64 << 20 else 1
    watches = {name: Timer(f) for name, f in sides.items()}
    for name in list(watches):
        try:
            watches[name].prepare(args, n)
        except Exception as e:
            row[f"{name}_error"] = f"{type(e).__name__}: {e}"[:400]
            del watches[name]
    if "expert" not in watches:
        return row
    if not any(isinstance(v, GeneratorArg) for v in args.values()):
        row["right"] = verified(task, case, args, watches["expert"])
    taken: dict[str, list[float]] = {name: [] for name in watches}
    for turn in range(ROUNDS):
        order = [(turn + k) % n for k in range(BLOCK)]
        for name in watches if turn % 2 else reversed(list(watches)):
            if turn and statistics.median(taken[name]) > SLOW_US:
                continue
            taken[name] += watches[name].measure(order if turn else order[:1])
    for name, us in taken.items():
        row[f"{name}_us"] = round(statistics.median(us[1:] or us), 2)
    return row


def verified(task: Any, case: Any, args: dict[str, Any], timer: Timer) -> str:
    """Judge a new call at the timed size.

    Args:
        task: the task.
        case: the case.
        args: its inputs.
        timer: the side that is called.

    Returns:
        What is wrong; empty where the result is correct.
    """
    call_args = reference.resolve(args, "cuda")
    outputs = timer.function(**assembled(call_args))
    torch.cuda.synchronize()
    many = isinstance(outputs, tuple | list)
    outputs = tuple(outputs) if many else (outputs,)
    names = {id(v): k for k, v in call_args.items() if isinstance(v, torch.Tensor)}
    aliases = tuple(names.get(id(o)) for o in outputs)
    after = {k: v for k, v in call_args.items() if isinstance(v, torch.Tensor)}
    answer = judge.Answer(outputs, many, after, aliases, aliases)
    on_gpu = {k: v.cuda() if isinstance(v, torch.Tensor) else v for k, v in args.items()}
    count = judge.calls_needed(task, case)
    return judge.judge(task, case, on_gpu, [answer] * count, device="cuda", timed=True).reason


def compiles(task_id: str) -> tuple[str, str]:
    """Compile the eager baseline at the largest timed size into the disk cache; return the task and the error or ``""``."""
    import signal

    def late(*_: Any) -> None:
        raise TimeoutError(f"torch.compile was not done in {COMPILE_SECONDS} s")

    signal.signal(signal.SIGALRM, late)
    signal.alarm(COMPILE_SECONDS)
    try:
        task = load_task(task_id)
        args = inputs.draw(task, task.timed[-1], inputs.case_seed(b"speed", task_id, "time", len(task.timed) - 1, 0))
        torch._dynamo.reset()
        Timer(torch.compile(task.eager or task.reference, dynamic=False)).prepare(args, 1)
        return task_id, ""
    except BaseException as e:
        return task_id, f"{type(e).__name__}: {e}"[:300]
    finally:
        signal.alarm(0)
        torch.cuda.empty_cache()


def speeds(ids: list[str], compiled: set[str], write: Any) -> list[dict[str, Any]]:
    """Time every timed case of some tasks; the inputs of the next cases are drawn in the background.

    Args:
        ids: ids of tasks.
        compiled: ids of the tasks for which torch.compile is timed too.
        write: writes the rows so far.

    Returns:
        One row for each case.
    """
    pool = ThreadPoolExecutor(6)
    work = [(t, k) for t in ids for k in range(len(load_task(t).timed))]
    ahead: dict[int, Any] = {}

    def draw(index: int) -> Any:
        t, k = work[index]
        task = load_task(t)
        return inputs.draw(task, task.timed[k], inputs.case_seed(b"speed", t, "time", k, 0))

    rows: list[dict[str, Any]] = []
    functions: dict[str, Any] = {}
    for index, (t, k) in enumerate(work):
        for later in range(index, min(index + 6, len(work))):
            if later not in ahead:
                ahead[later] = pool.submit(draw, later)
        task = load_task(t)
        start = time.perf_counter()
        try:
            if t not in functions:
                functions = {t: load(t)}
            sides = {"expert": functions[t], "eager": task.eager or task.reference}
            if t in compiled and k == len(task.timed) - 1:
                torch._dynamo.reset()
                sides["compiled"] = torch.compile(task.eager or task.reference, dynamic=False)
            row = timed(task, task.timed[k], ahead.pop(index).result(), sides)
        except Exception:
            row = {"case": task.timed[k].label(), "error": traceback.format_exc()[-800:]}
        torch._dynamo.reset()  # reference cycles in compiled code keep inputs alive
        gc.collect()
        torch.cuda.empty_cache()
        row |= {"task": t, "wall_seconds": round(time.perf_counter() - start, 2)}
        if row.get("expert_us") and row.get("eager_us"):
            row["speedup"] = round(row["eager_us"] / row["expert_us"], 4)
        rows.append(row)
        print(f"{t:50} {row['case'][:50]:50} expert {row.get('expert_us')} eager {row.get('eager_us')} "
              f"x{row.get('speedup')} compiled {row.get('compiled_us')} {row['wall_seconds']} s "
              f"{row.get('right', '')} {row.get('error', '')} {row.get('expert_error', '')}", flush=True)  # fmt: skip
        write(rows)
    return rows


def main() -> None:
    """Run both parts; write after every row, so that an interrupted run keeps its results so far."""
    p = argparse.ArgumentParser()
    p.add_argument("out", type=Path)
    p.add_argument("--tasks", default="*")
    p.add_argument("--workers", type=int, default=12)
    p.add_argument("--compile", action="store_true")
    p.add_argument("--parts", default="grade,speed")
    p.add_argument("--shard", default="1/1", help="every n-th of the tasks, counted from one")
    a = p.parse_args()
    a.out.mkdir(parents=True, exist_ok=True)
    first, step = (int(v) for v in a.shard.split("/"))
    ids = [t.id for t in load_tasks(pattern=a.tasks) if expert_source(t.id)][first - 1 :: step]
    result: dict[str, Any] = {
        "device": torch.cuda.get_device_name(0), "torch": torch.__version__, "triton": triton.__version__,
        "cuda": torch.version.cuda, "python": sys.version.split()[0], "date": time.strftime("%Y-%m-%d"),
    }  # fmt: skip

    def write(name: str, rows: list[dict[str, Any]]) -> None:
        result[name] = rows
        (a.out / "expert_speed.json").write_text(json.dumps(result, indent=1))

    if "grade" in a.parts.split(","):
        rows: list[dict[str, Any]] = []
        start = time.perf_counter()
        with ProcessPoolExecutor(a.workers, multiprocessing.get_context("spawn")) as pool:
            for done in as_completed([pool.submit(graded, t) for t in ids]):
                rows.append(done.result())
                row = rows[-1]
                if not row["correct"]:
                    print(
                        f"{row['task']:50} {row['verdict']} {row['wall_seconds']} s {row['message'][:600]}", flush=True
                    )
        print(
            f"{sum(r['correct'] for r in rows)} of {len(rows)} correct in {time.perf_counter() - start:.0f} s",
            flush=True,
        )
        result["grade_seconds"] = round(time.perf_counter() - start, 1)
        write("graded", rows)
    if "speed" in a.parts.split(","):
        start = time.perf_counter()
        compiled: set[str] = set()
        if a.compile:
            with ProcessPoolExecutor(a.workers, multiprocessing.get_context("spawn")) as pool:
                for t, wrong in pool.map(compiles, ids):
                    compiled |= set() if wrong else {t}
                    result.setdefault("compile_failures", {}).update({t: wrong} if wrong else {})
                    print(f"torch.compile {t}: {wrong}" if wrong else "", end="\n" if wrong else "", flush=True)
            result["compile_seconds"] = round(time.perf_counter() - start, 1)
            print(f"torch.compile of {len(compiled)} in {result['compile_seconds']} s", flush=True)
        start = time.perf_counter()
        rows = speeds(ids, compiled, lambda r: write("speed", r))
        result["speed_seconds"] = round(time.perf_counter() - start, 1)
        write("speed", rows)
        means: dict[str, list[float]] = {}
        for t in ids:
            logs = [math.log(r["speedup"]) for r in rows if r["task"] == t and r.get("speedup")]
            if logs:
                means.setdefault(t.split("/")[0], []).append(math.exp(sum(logs) / len(logs)))
        for category, values in sorted(means.items()):
            slower = sum(v < 1 for v in values)
            print(
                f"{category:16} {len(values):3} tasks, median {statistics.median(values):.2f}, slower than eager {slower}"
            )


if __name__ == "__main__":
    main()
