"""How far a measured speedup can be trusted: kernels against themselves, again, slowed on purpose, and by other clocks.

    python eval/timing_quality.py [--aa N] [--retest N] [--slowed N] [--workers W] [--seconds S]
                                  [--no-clocks] [--json FILE]

Needs a GPU. ``--aa`` times a kernel against itself in two fresh processes: the ratio must be 1 and the interval hold it.
``--retest`` times kernels against eager again and again, each time in fresh processes. ``--slowed`` times a kernel against one
that does 2 % more of the same work. Last come Triton's ``do_bench`` and the profiler's device time of the same kernels. Each
for calls of about 5, 20 to 70 and more than 200 us. Work is prepared in parallel and timed alone, as in every grading.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Future, ProcessPoolExecutor, wait
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
if __package__ in (None, ""):
    sys.path.insert(0, str(ROOT))

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from kbx_env.errors import UsageError
from kbx_env.grading import inputs
from kbx_env.grading.grader import Grader, resolve_backend
from kbx_env.grading.runtime.session import RunnerSession
from kbx_env.grading.timing import contestants, input_windows
from kbx_env.grading.timing import paired as clock
from kbx_env.grading.timing.input_windows import InputWindows
from kbx_env.spec.catalog import expert_source, load_task
from kbx_env.spec.task import Case, Task

SIZES = ("tiny", "middle", "large")
KERNELS: dict[str, tuple[dict[str, Any], ...]] = {
    "activation/relu": ({"*": (1 << 17,)}, {"*": (1 << 24,)}, {"*": (1 << 27,)}),
    "math/softmax": ({"*": (512, 512)}, {"*": (16384, 1024)}, {"*": (16384, 8192)}),
}
"""By task the axes of a tiny, a middle and a large case."""
SLOWER = 1.02
COLUMNS = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())

COPY = '''
import torch, triton, triton.language as tl


@triton.jit
def relu_kernel(x, y, n, BLOCK: tl.constexpr, BLOCKS, EVERY):
    pid = tl.program_id(0)
    if pid >= BLOCKS:  # some blocks once more, far apart, so that no cache holds them
        pid = (pid - BLOCKS) * EVERY
    at = pid.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(x + at, mask=at < n)
    tl.store(y + at, tl.where(v != v, v, tl.maximum(v, 0.0)), mask=at < n)


def relu(input, inplace=False):
    x = input.contiguous()
    y = torch.empty_like(x)
    blocks = triton.cdiv(x.numel(), 1024)
    if blocks:
        relu_kernel[(blocks + int(blocks * MORE),)](x, y, x.numel(), BLOCK=1024, BLOCKS=blocks, EVERY=int(1 / MORE) if MORE else 1)
    return input.copy_(y) if inplace else y
'''  # fmt: skip
"""A kernel that does a share MORE of its work twice."""


def case_of(task: Task, size: str) -> Case:
    """A timed case of the task with other axes."""
    axes = KERNELS[task.id][SIZES.index(size)]
    return replace(task.timed[0], axes={**task.timed[0].axes, **axes})


_grader: Grader | None = None


def compared(job: tuple[str, str, str, str | None, str, int]) -> dict[str, Any]:
    """Time two sides, each in a fresh process: ``first`` is a source, or ``None`` for eager."""
    global _grader
    _grader = _grader or Grader()
    kind, task_id, size, first, second, repeat = job
    task = load_task(task_id)
    case, secret = case_of(task, size), b"quality %d" % repeat
    began = time.perf_counter()
    talks = [RunnerSession(_grader.zygote(), task, "cuda", secret, "eval", 60.0) for _ in range(1 if first is None else 2)]
    try:
        talks[-1].gpu = talks[0].gpu  # one use of the GPU
        for talk, source in zip(talks, [second] if first is None else [first, second], strict=True):
            talk.load(source.encode())
        gpu, eager = talks[0].gpu, None
        with gpu.using():
            ring = InputWindows.draw(
                task, case, [inputs.case_seed(secret, task.id, "quality", 0, k) for k in range(input_windows.MAX_DRAWS)], "cuda"
            )
        mine = [clock.RunnerContestant(t, case) for t in talks]
        for side in mine:
            side.prepare(ring)
        if first is None:
            eager = contestants.EagerContestant(task, case)
            with gpu.using():
                eager.prepare(ring)
        with gpu.alone():
            start = time.perf_counter()
            paired = clock.pair(eager or mine[0], mine[-1], windows=ring)
            alone = time.perf_counter() - start
        if eager is not None:
            eager.watch.close()
    finally:
        for talk in talks:
            talk.__exit__()
    return {
        "kind": kind, "task": task_id, "size": size, "us": paired.candidate_us, "ratio": math.exp(paired.log_ratio),
        "low": math.exp(paired.low), "high": math.exp(paired.high), "pairs": paired.pairs, "alone_seconds": alone,
        "seconds": time.perf_counter() - began,
    }  # fmt: skip


def jobs(aa: int, retest: int, slowed: int) -> list[tuple[str, str, str, str | None, str, int]]:
    """What to time, sizes and tasks in turns."""
    found: list[tuple[str, str, str, str | None, str, int]] = []
    places = [(t, s) for s in SIZES for t in KERNELS]
    for k in range(aa):
        task, size = places[k % len(places)]
        source = expert_source(task) or ""
        found.append(("aa", task, size, source, source, k))
    for k in range(retest):
        task, size = places[k % len(places)]
        found.append(("retest", task, size, None, expert_source(task) or "", k))
    for k in range(slowed):
        plain, slow = COPY.replace("MORE", "0"), COPY.replace("MORE", f"{SLOWER - 1:g}")
        found.append(("slowed", "activation/relu", SIZES[1 + k % 2], slow, plain, k))
    return found


def summary(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Per kind, task and size: how the ratios lie."""
    told = []
    for kind, task, size in dict.fromkeys((r["kind"], r["task"], r["size"]) for r in rows):
        mine = [r for r in rows if (r["kind"], r["task"], r["size"]) == (kind, task, size)]
        logs = [math.log(r["ratio"]) for r in mine]
        truth = {"aa": 1.0, "slowed": SLOWER}.get(kind)
        middle = statistics.median(r["us"] for r in mine)
        bound = 0.01 if middle >= 20 else 0.03
        told.append({
            "kind": kind, "task": task, "size": size, "runs": len(mine), "us": middle,
            "ratio": math.exp(statistics.mean(logs)), "sd": statistics.stdev(logs) if len(logs) > 1 else None,
            "half_interval": statistics.mean(math.log(r["high"] / r["low"]) / 2 for r in mine),
            "within_bound": sum(abs(x) <= bound for x in logs) if kind == "aa" else None, "bound": bound if kind == "aa" else None,
            "interval_holds_truth": None if truth is None else sum(r["low"] <= truth <= r["high"] for r in mine),
            "interval_excludes_1": sum(not r["low"] <= 1 <= r["high"] for r in mine),
            "alone_seconds": statistics.mean(r["alone_seconds"] for r in mine),
        })  # fmt: skip
    return told


def other_clocks() -> list[dict[str, Any]]:
    """The same kernels by our stopwatch, by ``triton.testing.do_bench`` and by the profiler, in this process (us, median)."""
    import importlib.util

    import torch
    import triton

    from kbx_env.device.stopwatch import Stopwatch
    from kbx_env.grading import reference
    from kbx_env.protocol.wire import assembled

    rows = []
    for task_id in KERNELS:
        task = load_task(task_id)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "expert.py"
            path.write_text(expert_source(task_id) or "")
            spec = importlib.util.spec_from_file_location("expert", path)
            assert spec and spec.loader
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            for size in SIZES:
                case = case_of(task, size)
                draws = [reference.resolve(inputs.draw(task, case, k, "cuda"), "cuda") for k in range(contestants.SLOTS)]

                def call(slot: dict[str, Any], function: Any = getattr(module, task.entry)) -> Any:
                    return function(**assembled(slot))

                watch = Stopwatch("cuda")
                watch.prepare(call, draws)
                ours = statistics.median(u for _ in range(20) for u in watch.measure({"order": [0, 1, 2, 0, 1]})["us"])
                bench = 1e3 * triton.testing.do_bench(partial(call, draws[0]), warmup=50, rep=200, return_mode="median")
                with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
                    for k in range(50):
                        torch.empty(128 << 20, dtype=torch.float32, device="cuda").fill_(float(k))  # evicts L2
                        call(draws[k % 3])
                    torch.cuda.synchronize()
                ours_not = ("fill", "elementwise")
                device = [e.device_time for e in seen.events()
                          if e.device_time > 0 and not any(n in e.name.lower() for n in ours_not)]  # fmt: skip
                rows.append({
                    "task": task_id, "size": size, "stopwatch_us": ours, "do_bench_us": bench,
                    "profiler_us": statistics.median(device) if device else None,
                })  # fmt: skip
                watch.close()
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print JSON; exit 1 where something failed, 2 without a GPU, 130 when interrupted."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--aa", type=int, default=200)
    p.add_argument("--retest", type=int, default=30)
    p.add_argument("--slowed", type=int, default=20)
    p.add_argument("--workers", type=int, default=6)
    p.add_argument("--seconds", type=float, default=math.inf, help="begin nothing new after so long")
    p.add_argument("--clocks", action=argparse.BooleanOptionalAction, default=True, help="the other clocks too")
    p.add_argument("--json", type=Path, metavar="FILE", help="also where it is interrupted")
    a = p.parse_args(argv)
    try:
        resolve_backend("cuda")
    except UsageError as e:
        print(f"timing_quality: {e}", file=sys.stderr)
        return 2
    import torch
    import triton

    began, rows, failed = time.monotonic(), list[dict[str, Any]](), list[str]()
    todo = jobs(a.aa, a.retest, a.slowed)
    clocks: list[dict[str, Any]] | None = None

    def write(interrupted: bool) -> None:
        told = {
            "device": torch.cuda.get_device_name(0), "torch": torch.__version__, "triton": triton.__version__,
            "date": time.strftime("%Y-%m-%d"), "seconds": time.monotonic() - began, "planned": len(todo), "failed": failed,
            "interrupted": interrupted, "summary": summary(rows), "other_clocks": clocks, "rows": rows,
        }  # fmt: skip
        print(json.dumps({k: v for k, v in told.items() if k != "rows"}, indent=1))
        if a.json:
            a.json.write_text(json.dumps(told))

    pool, interrupted = ProcessPoolExecutor(a.workers, multiprocessing.get_context("spawn")), False
    try:
        with Progress(*COLUMNS, console=Console(stderr=True)) as bar:
            line = bar.add_task("timing", total=len(todo))
            # A few at a time, so that little is left to wait for when the time is up.
            left, running = deque(todo), set[Future[dict[str, Any]]]()
            while running or (left and time.monotonic() - began <= a.seconds):
                while left and len(running) < 2 * a.workers and time.monotonic() - began <= a.seconds:
                    running.add(pool.submit(compared, left.popleft()))
                ended, running = wait(running, return_when=FIRST_COMPLETED)
                for future in ended:
                    try:
                        rows.append(future.result())
                    except BrokenExecutor:  # a process died: told below
                        raise
                    except Exception as e:  # one that fails is told, and costs no other
                        failed.append(f"{type(e).__name__}: {e}"[:300])
                    bar.advance(line)
        if a.clocks:
            clocks = other_clocks()
    except KeyboardInterrupt:
        interrupted = True
        for process in list(getattr(pool, "_processes", {}).values()):
            process.kill()  # what it has begun takes seconds, and nobody waits for it
    except Exception as e:  # what was measured until then is not lost
        failed.append(f"{type(e).__name__}: {e}"[:300])
    pool.shutdown(wait=not interrupted, cancel_futures=True)
    write(interrupted)
    return 130 if interrupted else 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
