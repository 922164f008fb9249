"""Measures the precision of speedups: kernels against themselves, repeated, slowed on purpose, and by other clocks.

    python eval/timing_quality.py [--aa N] [--bias N] [--retest N] [--slowed N] [--workers W] [--seconds S]
                                  [--no-clocks] [--json FILE]

Needs a GPU. ``--aa`` times a kernel against itself in two fresh processes: the ratio must be 1, and the interval must
contain 1. ``--bias`` does the same with one of the two in the grader, in eager's place: neither place may be an advantage.
``--retest`` times kernels against eager repeatedly, each time in fresh processes. ``--slowed`` times a
kernel against one that does 2 % more of the same work. Last come Triton's ``do_bench`` and the profiler's device time
of the same kernels. All are done for calls of about 5, 20 to 70 and more than 200 us. Work is prepared in parallel and
timed alone, as in every grading.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Future, ProcessPoolExecutor, wait
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from kbx_env.errors import UsageError
from kbx_env.grading import inputs
from kbx_env.grading.grader import Grader
from kbx_env.grading.runtime.session import RunnerSession
from kbx_env.grading.timing import contestants, input_windows
from kbx_env.grading.timing.contestants import RunnerContestant
from kbx_env.grading.timing.input_windows import InputWindows
from kbx_env.grading.timing.paired import pair
from kbx_env.options import resolve_backend
from kbx_env.spec.catalog import expert_source, load_task
from kbx_env.spec.task import Case, Task

SIZES = ("tiny", "middle", "large")
KERNELS: dict[str, tuple[dict[str, Any], ...]] = {
    "activation/relu": ({"*": (1 << 17,)}, {"*": (1 << 24,)}, {"*": (1 << 27,)}),
    "math/softmax": ({"*": (512, 512)}, {"*": (16384, 1024)}, {"*": (16384, 8192)}),
}
"""By task the axes of a tiny, a middle and a large case."""
SLOWER = 1.02
"""Work of the slowed kernel, relative to the plain one."""
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
    """Return a timed case of a task with the axes of a size."""
    axes = KERNELS[task.id][SIZES.index(size)]
    return replace(task.timed[0], axes={**task.timed[0].axes, **axes})


_grader: Grader | None = None


def compared(job: tuple[str, str, str, str | None, str, int]) -> dict[str, Any]:
    """Time two kernels against each other, each in a fresh process.

    Args:
        job: (kind, task, size, first source or ``None`` for eager, second source, number of the repetition).

    Returns:
        A row of the result.
    """
    global _grader
    _grader = _grader or Grader()
    kind, task_id, size, first, second, repeat = job
    task = load_task(task_id)
    case, secret = case_of(task, size), b"quality %d" % repeat
    began = time.perf_counter()
    entry = _entry(task, second) if kind == "bias" else None
    sessions = [RunnerSession(_grader.zygote(), task, "cuda", secret, "eval", 60.0) for _ in range(1 if first is None else 2)]
    try:
        sessions[-1].gpu = sessions[0].gpu  # both share one lock of the GPU
        for session, source in zip(sessions, [second] if first is None else [first, second], strict=True):
            session.load(source.encode())
        gpu, eager = sessions[0].gpu, None
        with gpu.using():
            ring = InputWindows.draw(
                task, case, [inputs.case_seed(secret, task.id, "quality", 0, k) for k in range(input_windows.MAX_DRAWS)], "cuda"
            )
        runners = [RunnerContestant(s, case) for s in sessions]
        for side in runners:
            side.describe()
            side.dry()
            side.finish_compiling()
        with gpu.alone():
            # Sending the values copies them on the GPU, which would disturb what others measure.
            for side in runners:
                side.lay(ring)
                side.warm()
            if first is None:
                eager = contestants.EagerContestant(task, case, function=entry)
                eager.prepare(ring)
            start = time.perf_counter()
            paired = pair(eager or runners[0], runners[-1], windows=ring)
            alone = time.perf_counter() - start
        if eager is not None:
            eager.watch.close()
    finally:
        for session in sessions:
            session.__exit__()
    return {
        "kind": kind, "task": task_id, "size": size, "us": paired.candidate_us, "ratio": math.exp(paired.log_ratio),
        "low": math.exp(paired.low), "high": math.exp(paired.high), "pairs": paired.pairs, "alone_seconds": alone,
        "seconds": time.perf_counter() - began,
    }  # fmt: skip


def _entry(task: Task, source: str) -> Callable[..., Any]:
    """Return the entry function of an expert, loaded in this process: experts are our own code."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "expert.py"
        path.write_text(source)
        spec = importlib.util.spec_from_file_location("expert", path)
        assert spec and spec.loader
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)  # Triton reads the kernels' text now
    found: Callable[..., Any] = getattr(module, task.entry)
    return found


def jobs(aa: int, retest: int, slowed: int, bias: int = 0) -> list[tuple[str, str, str, str | None, str, int]]:
    """Return the pairs to time, sizes and tasks in turns.

    Args:
        aa: kernels against themselves.
        retest: kernels against eager.
        slowed: kernels against slower copies.
        bias: kernels against themselves, one of them in the grader.

    Returns:
        Arguments of `compared`.
    """
    found: list[tuple[str, str, str, str | None, str, int]] = []
    cases = [(t, s) for s in SIZES for t in KERNELS]
    for k in range(aa):
        task, size = cases[k % len(cases)]
        source = expert_source(task) or ""
        found.append(("aa", task, size, source, source, k))
    for k in range(bias):
        task, size = cases[k % len(cases)]
        found.append(("bias", task, size, None, expert_source(task) or "", k))
    for k in range(retest):
        task, size = cases[k % len(cases)]
        found.append(("retest", task, size, None, expert_source(task) or "", k))
    for k in range(slowed):
        plain, slow = COPY.replace("MORE", "0"), COPY.replace("MORE", f"{SLOWER - 1:g}")
        found.append(("slowed", "activation/relu", SIZES[1 + k % 2], slow, plain, k))
    return found


def summary(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the spread of the ratios by kind, task and size."""
    found = []
    for kind, task, size in dict.fromkeys((r["kind"], r["task"], r["size"]) for r in rows):
        runs = [r for r in rows if (r["kind"], r["task"], r["size"]) == (kind, task, size)]
        logs = [math.log(r["ratio"]) for r in runs]
        truth = {"aa": 1.0, "bias": 1.0, "slowed": SLOWER}.get(kind)
        middle = statistics.median(r["us"] for r in runs)
        bound = 0.01 if middle >= 20 else 0.03
        found.append({
            "kind": kind, "task": task, "size": size, "runs": len(runs), "us": middle,
            "ratio": math.exp(statistics.mean(logs)), "sd": statistics.stdev(logs) if len(logs) > 1 else None,
            "half_interval": statistics.mean(math.log(r["high"] / r["low"]) / 2 for r in runs),
            "within_bound": sum(abs(x) <= bound for x in logs) if truth == 1.0 else None, "bound": bound if truth == 1.0 else None,
            "interval_holds_truth": None if truth is None else sum(r["low"] <= truth <= r["high"] for r in runs),
            "interval_excludes_1": sum(not r["low"] <= 1 <= r["high"] for r in runs),
            "alone_seconds": statistics.mean(r["alone_seconds"] for r in runs),
        })  # fmt: skip
    return found


def other_clocks() -> list[dict[str, Any]]:
    """Time the same kernels in this process with our stopwatch, ``triton.testing.do_bench`` and the profiler (us, median)."""
    import torch
    import triton

    from kbx_env.device.stopwatch import Stopwatch
    from kbx_env.grading import reference
    from kbx_env.protocol.wire import assembled

    rows = []
    for task_id in KERNELS:
        task = load_task(task_id)
        function = _entry(task, expert_source(task_id) or "")
        for size in SIZES:
            case = case_of(task, size)
            draws = [reference.resolve(inputs.draw(task, case, k, "cuda"), "cuda") for k in range(contestants.SLOTS)]

            def call(slot: dict[str, Any], function: Callable[..., Any] = function) -> Any:
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
            other_kernels = ("fill", "elementwise")
            device = [e.device_time for e in seen.events()
                      if e.device_time > 0 and not any(n in e.name.lower() for n in other_kernels)]  # fmt: skip
            rows.append({
                "task": task_id, "size": size, "stopwatch_us": ours, "do_bench_us": bench,
                "profiler_us": statistics.median(device) if device else None,
            })  # fmt: skip
            watch.close()
    return rows


def _parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--aa", type=int, default=200)
    p.add_argument("--bias", type=int, default=30)
    p.add_argument("--retest", type=int, default=30)
    p.add_argument("--slowed", type=int, default=20)
    p.add_argument("--workers", type=int, default=6)
    p.add_argument("--seconds", type=float, default=math.inf, help="begin nothing new after so long")
    p.add_argument("--clocks", action=argparse.BooleanOptionalAction, default=True, help="the other clocks too")
    p.add_argument("--json", type=Path, metavar="FILE", help="also where it is interrupted")
    return p


class _Measurement:
    """A measurement in progress: rows of timings, failures and the other clocks' times so far."""

    def __init__(self, a: argparse.Namespace) -> None:
        self.a, self.began = a, time.monotonic()
        self.todo = jobs(a.aa, a.retest, a.slowed, a.bias)
        self.rows: list[dict[str, Any]] = []
        self.failed: list[str] = []
        self.clocks: list[dict[str, Any]] | None = None

    def time_all(self, pool: ProcessPoolExecutor) -> None:
        """Time all pairs in the pool, or as many as begin within ``--seconds``."""
        with Progress(*COLUMNS, console=Console(stderr=True)) as bar:
            line = bar.add_task("timing", total=len(self.todo))
            # A few at a time, so that few are still running when the time is up.
            left, running = deque(self.todo), set[Future[dict[str, Any]]]()
            while running or (left and self.in_time):
                while left and len(running) < 2 * self.a.workers and self.in_time:
                    running.add(pool.submit(compared, left.popleft()))
                ended, running = wait(running, return_when=FIRST_COMPLETED)
                for future in ended:
                    self.keep(future)
                    bar.advance(line)

    @property
    def in_time(self) -> bool:
        """Whether a new pair may begin."""
        return bool(time.monotonic() - self.began <= self.a.seconds)

    def keep(self, future: Future[dict[str, Any]]) -> None:
        """Keep a result, or the failure of one pair, which does not end the others."""
        try:
            self.rows.append(future.result())
        except BrokenExecutor:  # a process died: the caller reports it
            raise
        except Exception as e:
            self.failed.append(_line(e))

    def write(self, interrupted: bool) -> None:
        """Print the summary, and write all to ``--json``."""
        import torch
        import triton

        report = {
            "device": torch.cuda.get_device_name(0), "torch": torch.__version__, "triton": triton.__version__,
            "date": time.strftime("%Y-%m-%d"), "seconds": time.monotonic() - self.began, "planned": len(self.todo),
            "failed": self.failed, "interrupted": interrupted, "summary": summary(self.rows), "other_clocks": self.clocks,
            "rows": self.rows,
        }  # fmt: skip
        print(json.dumps({k: v for k, v in report.items() if k != "rows"}, indent=1))
        if self.a.json:
            self.a.json.write_text(json.dumps(report))


def _line(e: Exception) -> str:
    return f"{type(e).__name__}: {e}"[:300]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print JSON; return 1 if something failed, 2 without a GPU, 130 when interrupted, else 0."""
    a = _parser().parse_args(argv)
    try:
        resolve_backend("cuda")
    except UsageError as e:
        print(f"timing_quality: {e}", file=sys.stderr)
        return 2
    m = _Measurement(a)
    pool, interrupted = ProcessPoolExecutor(a.workers, multiprocessing.get_context("spawn")), False
    try:
        m.time_all(pool)
        if a.clocks:
            m.clocks = other_clocks()
    except KeyboardInterrupt:
        interrupted = True
        for process in list(getattr(pool, "_processes", {}).values()):
            process.kill()  # a pair that has begun takes seconds, and its result is not needed
    except Exception as e:  # keep the measurements so far
        m.failed.append(_line(e))
    pool.shutdown(wait=not interrupted, cancel_futures=True)
    m.write(interrupted)
    return 130 if interrupted else 1 if m.failed else 0


if __name__ == "__main__":
    sys.exit(main())
