"""Grade all experts with timing on one GPU, as users do: many workers, optionally beside a load on every core.

    python benchmarks/experts_timed.py OUT.jsonl [--tasks 'math/*,reduce/*'] [--workers 14] [--gpus 1] [--load] [--runs 1]
                                       [--seconds S] [--phases] [--turns N,S] [--precision report|training] [--count N]
                                       [--tasks-from PACK]

The experts are correct, so every other verdict is an error of the grader. ``--tasks-from`` takes the tasks of a pack instead, and
of a generated one the kernels of its ``kernels.jsonl``. Each line of OUT is one grading: verdict, speedup with
its 95 % interval, and for every timed case times in microseconds, the floor in microseconds and the share of the roofline. A
summary goes to the terminal and, with the ceilings, to OUT's last line. ``--load`` keeps every core busy, because the host's speed
must not change the measured ceilings. ``--phases`` adds the seconds of each step for which the GPU was held exclusively.
``--turns`` tries another rhythm of the GPU lock: exclusive holders in a row, and seconds of the shared window after them.

The exit status is 0 if every grading is correct and none is void, otherwise 1.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import math
import multiprocessing
import os
import random
import re
import statistics
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
if __package__ in (None, ""):
    sys.path.insert(0, str(ROOT))

import torch
from kbx_env.eval import stats
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from kbx_env import jsonl, versions
from kbx_env.deadlines import deadline_of
from kbx_env.errors import UsageError
from kbx_env.executor import GRADER, Executor, Request
from kbx_env.executor.pools.gpu import gpu_pool, uuids_of
from kbx_env.grading import compulsory_work
from kbx_env.grading.grader import Grader
from kbx_env.grading.timing import gpu_lock, task_timing
from kbx_env.options import PRECISIONS
from kbx_env.outcome import Outcome
from kbx_env.spec import packs
from kbx_env.spec.catalog import expert_source, task_ids

LONG_SECONDS = 40.0
"""A grading that takes longer writes its stack."""
PHASED = "benchmarks.experts_timed:PhasedGrader"
TURNS = "KBX_BENCHMARK_TURNS"
"""Environment variable with the value of ``--turns``, for the workers."""


@contextmanager
def stacks_of_long_work(seconds: float, out: Any) -> Iterator[None]:
    """Write the caller's Python stack to an open text file every so many seconds.

    ``faulthandler.dump_traceback_later`` does the same without the interpreter's lock: on a busy machine it read frames that had
    just changed, and killed two gradings.
    """
    done, watched, began = threading.Event(), threading.get_ident(), time.monotonic()

    def watch() -> None:
        while not done.wait(seconds):
            frame = sys._current_frames().get(watched)
            stack = "".join(traceback.format_stack(frame)) if frame else "(ended)"
            out.write(f"after {time.monotonic() - began:.0f} s:\n{stack}\n")
            out.flush()

    thread = threading.Thread(target=watch, name="stacks", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


class Samples:
    """Counts the Python stacks of one thread, to see where a grading spends its wall time.

    Args:
        period: seconds between two samples.
    """

    def __init__(self, period: float = 0.02) -> None:
        self.period, self.counts = period, Counter[str]()

    @contextmanager
    def of_this_thread(self) -> Iterator[None]:
        """Sample the calling thread within the block."""
        done, watched = threading.Event(), threading.get_ident()

        def watch() -> None:
            while not done.wait(self.period):
                frame = sys._current_frames().get(watched)
                if frame is not None:
                    self.counts[_folded(frame)] += 1
                del frame

        thread = threading.Thread(target=watch, name="samples", daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()


def _folded(frame: Any) -> str:
    """Return the project's functions of a stack and the innermost other function, outermost first, joined by semicolons.

    A function that sends a command to a process has the command's name in square brackets.
    """
    names = list[str]()
    while frame is not None:
        path, code = frame.f_code.co_filename, frame.f_code
        if "kbx_env" in path:
            header = frame.f_locals.get("header") if code.co_name == "_ask" else None
            command = f"[{header.get('do') or header.get('op')}]" if isinstance(header, dict) else ""
            names.append(f"{Path(path).stem}:{code.co_name}{command}")
        elif not names:
            names.append(f"({Path(path).stem}:{code.co_name})")
        frame = frame.f_back
    return ";".join(reversed(names))


def _caller() -> str:
    """Return the project's function that asks for the GPU lock."""
    frame = sys._getframe(1)
    while frame is not None and Path(frame.f_code.co_filename).stem in ("gpu_lock", "contextlib", "experts_timed"):
        frame = frame.f_back  # type: ignore[assignment]
    return "" if frame is None else f"{Path(frame.f_code.co_filename).stem}:{frame.f_code.co_name}"


class PhasedGrader(Grader):
    """A grader whose manifests have the steps of its exclusive use of the GPU (``phases``) and its use of the lock (``locks``).

    Times are in seconds. In the folder of the environment variable KBX_STALLS a worker that takes longer than LONG_SECONDS writes
    its stack to ``stalls-PID.txt``; every worker writes how often each stack was seen (``Samples``) to ``samples-PID.txt``, and
    each hold of the GPU lock to ``holds-PID.txt``: kind, when it was asked for, when it began, when it ended, who asked.
    """

    def __init__(self) -> None:
        from benchmarks.alone_phases import Phases

        super().__init__()
        if turns := os.environ.get(TURNS):
            batch, window = turns.split(",")
            gpu_lock.EXCLUSIVE_BATCH, gpu_lock.SHARED_WINDOW_SECONDS = int(batch), float(window)
        self._phases = Phases()
        self._phases.watch_all()
        self._locks: dict[str, dict[str, float]] = {}
        folder = Path(os.environ.get("KBX_STALLS", tempfile.gettempdir()))
        self._stalls = (folder / f"stalls-{os.getpid()}.txt").open("w")
        self._holds = (folder / f"holds-{os.getpid()}.txt").open("w", buffering=1)
        self._samples, self._samples_file = Samples(), folder / f"samples-{os.getpid()}.txt"
        for kind in ("shared", "alone", "room"):
            self._watch_lock(kind)
        self._judging: list[float] = []
        self._watch_judging()

    def _watch_judging(self) -> None:
        """Record the largest device memory of judging each case, in multiples of the bytes of its inputs."""
        real, judging = task_timing.case_time, self._judging

        def watched(task: Any, one: Any, *more: Any) -> Any:
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            row = real(task, one, *more)
            size = max(1, compulsory_work.input_bytes(task, one.candidate.case))
            judging.append(round((torch.cuda.max_memory_allocated() - before) / size, 1))
            return row

        task_timing.case_time = watched

    def _watch_lock(self, kind: str) -> None:
        real, locks = getattr(gpu_lock.GpuLock, kind), self._locks

        @contextmanager
        def watched(lock: gpu_lock.GpuLock, *args: Any) -> Iterator[float]:
            asked, caller = time.monotonic(), _caller()
            with real(lock, *args) as waited:
                began = time.monotonic()
                try:
                    yield waited
                finally:
                    self._holds.write(f"{kind} {asked:.4f} {began:.4f} {time.monotonic():.4f} {caller}\n")
                    row = locks.setdefault(kind, {"holds": 0, "waited": 0.0, "held": 0.0, "longest": 0.0})
                    held = time.monotonic() - began
                    row["holds"] += 1
                    row["waited"] += waited
                    row["held"] += held
                    row["longest"] = max(row["longest"], held)

        setattr(gpu_lock.GpuLock, kind, watched)

    def grade(self, *args: Any, **options: Any) -> Outcome:
        """Grade; see ``Grader.grade``."""
        self._phases.take()
        self._locks.clear()
        self._judging.clear()
        with stacks_of_long_work(LONG_SECONDS, self._stalls), self._samples.of_this_thread():
            outcome = super().grade(*args, **options)
        self._samples_file.write_text("".join(f"{stack} {n}\n" for stack, n in self._samples.counts.items()))
        outcome.manifest["phases"] = self._phases.take()  # type: ignore[index]
        outcome.manifest["locks"] = {k: dict(v) for k, v in self._locks.items()}  # type: ignore[index]
        outcome.manifest["judging"] = list(self._judging)  # type: ignore[index]
        return outcome


def _spin(stop: Any) -> None:
    x = 1.0
    while not stop.is_set():
        for _ in range(100_000):
            x = x * 1.0000001 + 1e-9


@contextmanager
def load_on_all_cores(on: bool) -> Iterator[None]:
    """Keep one process for each core that this process may use busy, if ``on``."""
    context = multiprocessing.get_context("spawn")
    stop = context.Event()
    busy = [context.Process(target=_spin, args=(stop,), daemon=True) for _ in range(len(os.sched_getaffinity(0)) if on else 0)]
    for process in busy:
        process.start()
    try:
        yield
    finally:
        stop.set()
        for process in busy:
            process.join(5)
            if process.is_alive():
                process.kill()


def row_of(run: int, task: str, outcome: Outcome, began: float, ended: float) -> dict[str, Any]:
    """Return one grading as a JSON object.

    Args:
        run: number of the run.
        task: the task.
        outcome: its outcome.
        began: start of the grading, in seconds since the run began.
        ended: its end, likewise.

    Returns:
        The row; its times are in seconds, or in microseconds where the name says so.
    """
    timing = outcome.timing
    cases = [
        {
            "case": c.case, "eager_us": c.eager_us, "candidate_us": c.candidate_us, "speedup": c.speedup, "low": c.low,
            "high": c.high, "pairs": c.pairs, "floor_us": c.floor_us, "void": c.void, "disturbed": c.disturbed,
            "share": c.floor_us / c.candidate_us if c.floor_us else None,
            "eager_share": c.floor_us / c.eager_us if c.floor_us else None,
            "ideal_bytes": c.ideal_bytes, "flops": c.flops,
        }
        for c in (timing.cases if timing else ())
    ]  # fmt: skip
    return {
        "run": run, "task": task, "verdict": str(outcome.verdict), "stage": str(outcome.stage), "message": outcome.message[:600],
        "violations": [v.rule for v in outcome.violations],
        "speedup": timing.speedup if timing else None, "low": timing.low if timing else None,
        "high": timing.high if timing else None, "notes": list(timing.notes) if timing else [], "cases": cases,
        "roofline": dict(timing.roofline) if timing and getattr(timing, "roofline", None) else None,
        "seconds": dict(outcome.seconds), "begin": round(began, 3), "end": round(ended, 3),
        "attempt": outcome.manifest.get("attempt"), "faults": outcome.manifest.get("faults", []),
        "phases": outcome.manifest.get("phases"), "locks": outcome.manifest.get("locks"),
        "judging": outcome.manifest.get("judging"),
    }  # fmt: skip


def kernels(tasks: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return the kernels that are graded.

    Args:
        tasks: ids of tasks.

    Returns:
        For each task its ``source``, and ``family`` and ``difficulty`` where the ``kernels.jsonl`` of a generated pack has them.
        Other tasks have their expert.

    Raises:
        UsageError: a task has no kernel, or a file cannot be read.
    """
    found = dict[str, dict[str, Any]]()
    for pack in {p.name: p for p in map(packs.pack_of, tasks) if p is not None}.values():
        if (file := pack.root / "kernels.jsonl").is_file():
            rows = jsonl.read(file)
            found |= {r["task"]: {"source": r["predict"], **{k: r.get(k) for k in ("family", "difficulty")}} for r in rows}
    for task in tasks:
        if task not in found and (expert := expert_source(task)) is not None:
            found[task] = {"source": expert}
    if without := [t for t in tasks if t not in found]:
        raise UsageError(f"no kernel of {', '.join(without[:5])}")
    return {t: found[t] for t in tasks}


def run_once(
    run: int, sources: Mapping[str, str], gpus: int, workers: int, out: Any, seconds: float, phases: bool, precision: str,
    about: Mapping[str, Mapping[str, Any]] | None = None,
) -> list[dict[str, Any]]:  # fmt: skip
    """Grade every kernel once; rows are written as they end.

    Args:
        run: the number of this run, for its rows.
        sources: the kernel of each task, in the order in which they are graded.
        gpus: GPUs to use.
        workers: gradings at a time on each GPU.
        out: an open text file for the rows.
        seconds: gradings that have not ended after so many seconds are listed as ``unfinished``.
        phases: whether the steps of exclusive use are recorded.
        precision: of the times.
        about: further fields of the rows, by task.

    Returns:
        The rows, in the order in which gradings ended.
    """
    pool = gpu_pool(gpus, workers, PHASED if phases else GRADER, uuids_of(gpus))
    rows: list[dict[str, Any]] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    begun: dict[int, float] = {}
    start = time.perf_counter()
    pool.on_attempt = lambda request, gpu, worker, begin, end: begun.setdefault(request.sample, begin - start)
    options = {"backend": "cuda", "targets": ("sm_90",), "timing": True, "precision": precision}
    with (
        Executor(pool, deadline=deadline_of(True), capacity=sys.maxsize) as executor,
        Progress(*columns, console=Console(stderr=True)) as bar,
    ):
        line = bar.add_task(f"run {run}", total=len(sources))
        flight: dict[Future[Outcome], tuple[int, str]] = {}
        for k, (task, source) in enumerate(sources.items()):
            request = Request(task, source.encode(), options, sample=1000 * run + k)
            flight[executor.submit(request)] = (request.sample, task)
        while flight and (left := seconds - (time.perf_counter() - start)) > 0:
            for job in wait(flight, timeout=left, return_when=FIRST_COMPLETED).done:
                sample, task = flight.pop(job)
                now = time.perf_counter() - start
                rows.append({**(about or {}).get(task, {}), **row_of(run, task, job.result(), begun.get(sample, 0.0), now)})
                out.write(jsonl.encode(rows[-1]))
                out.flush()
                bar.advance(line)
        for job, (_, task) in flight.items():
            rows.append({"run": run, "task": task, "verdict": "unfinished", "cases": [], "seconds": {}, "notes": []})
            out.write(jsonl.encode(rows[-1]))
            job.cancel()
        out.flush()
    return rows


def _spread(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return the largest divided by the smallest speedup of each task over several runs."""
    by: dict[str, list[float]] = defaultdict(list)
    for r in rows:
        if r.get("speedup"):
            by[r["task"]].append(r["speedup"])
    return {t: max(v) / min(v) for t, v in by.items() if len(v) > 1}


def speeds(rows: Sequence[dict[str, Any]], of: Mapping[str, Any]) -> dict[str, Any]:
    """Summarize the speedups of the kernels.

    Args:
        rows: the rows; of a task with several the mean of the logarithms counts.
        of: a group for each task, such as its family; tasks without one are in ``all`` only.

    Returns:
        For all tasks and for each group: ``tasks``; the geometric mean ``speedup`` with an interval that draws tasks (``low``,
        ``high``); the shares ``faster`` than eager, and ``surely_faster`` and ``surely_slower``, whose interval leaves out 1;
        ``interval``, the median of high / low - 1 of the gradings.
    """
    logs, sure = defaultdict[str, list[float]](list), defaultdict[str, list[tuple[float, float]]](list)
    for r in rows:
        if r.get("speedup"):
            logs[r["task"]].append(math.log(r["speedup"]))
            if r["low"] and r["high"]:
                sure[r["task"]].append((r["low"], r["high"]))
    found: dict[str, Any] = {}
    for name in ("all", *sorted({str(g) for t, g in of.items() if t in logs and g is not None})):
        tasks = [t for t in logs if name == "all" or str(of.get(t)) == name]
        means = [statistics.fmean(logs[t]) for t in tasks]
        if (mean := stats.mean(means)) is None:
            continue
        ends = [pair for t in tasks for pair in sure[t]]
        found[name] = {
            "tasks": len(tasks),
            **{k: None if v is None else round(v, 3) for k, v in zip(("speedup", "low", "high"),
                                                                     (mean.exp().value, mean.exp().low, mean.exp().high))},
            "faster": round(sum(m > 0 for m in means) / len(means), 3),
            "surely_faster": round(sum(all(lo > 1 for lo, _ in sure[t]) and bool(sure[t]) for t in tasks) / len(tasks), 3),
            "surely_slower": round(sum(all(hi < 1 for _, hi in sure[t]) and bool(sure[t]) for t in tasks) / len(tasks), 3),
            "interval": round(statistics.median(hi / lo - 1 for lo, hi in ends), 4) if ends else None,
        }  # fmt: skip
    return found


def summary(rows: Sequence[dict[str, Any]], walls: Sequence[float], workers: int, load: Sequence[bool]) -> dict[str, Any]:
    """Summarize the rows.

    Args:
        rows: the rows.
        walls: seconds of each run.
        workers: gradings at a time.
        load: whether the cores were kept busy.

    Returns:
        A JSON object.
    """
    spread = _spread(rows)
    shares = sorted((c["share"], r["task"], c["case"]) for r in rows for c in r["cases"] if c["share"])
    eager = sorted((c["eager_share"], r["task"], c["case"]) for r in rows for c in r["cases"] if c["eager_share"])
    slowest = sorted(((r["end"] - r["begin"], r["task"], r["run"]) for r in rows if "end" in r), reverse=True)
    exclusive = [r["seconds"]["alone"] for r in rows if "alone" in r["seconds"]]
    ceilings = {json.dumps(r["roofline"], sort_keys=True) for r in rows if r.get("roofline")}
    return {
        "date": time.strftime("%Y-%m-%d"), "environment": versions.environment("cuda"), "workers": workers,
        "load_on_all_cores": list(load), "wall_seconds": [round(w, 1) for w in walls],
        "verdicts": [dict(Counter(r["verdict"] for r in rows if r["run"] == k)) for k in range(1, len(walls) + 1)],
        "not_correct": [(r["run"], r["task"], r["verdict"], r.get("message", "")[:300]) for r in rows if r["verdict"] != "correct"],
        "void": [(r["run"], r["task"], c["case"], c["share"]) for r in rows for c in r["cases"] if c["void"]],
        "disturbed": [(r["run"], r["task"], c["case"]) for r in rows for c in r["cases"] if c["disturbed"]],
        "notes": [(r["run"], r["task"], n) for r in rows for n in r["notes"]],
        "slowest": [(round(s, 1), t, k) for s, t, k in slowest[:10]],
        "exclusive_mean_seconds": statistics.fmean(exclusive) if exclusive else None,
        "highest_share": shares[-10:], "highest_eager_share": eager[-10:],
        "spread_median": statistics.median(spread.values()) if spread else None,
        "spread_worst": sorted(((v, t) for t, v in spread.items()), reverse=True)[:5],
        "ceilings": [json.loads(c) for c in sorted(ceilings)], "speeds": speeds(rows, {r["task"]: r.get("family") for r in rows}),
    }  # fmt: skip


def tell(found: dict[str, Any], console: Console) -> None:
    """Print the summary."""
    table = Table("run", "load", "seconds", "verdicts")
    for k, (wall, verdicts, load) in enumerate(zip(found["wall_seconds"], found["verdicts"], found["load_on_all_cores"])):
        counted = ", ".join(f"{n} {v}" for v, n in verdicts.items())
        table.add_row(str(k + 1), "all cores" if load else "none", f"{wall:.0f}", counted)
    console.print(table)
    columns = ("tasks", "speedup", "low", "high", "faster", "surely_faster", "surely_slower", "interval")
    table = Table("kernels", *columns)
    for name, row in found["speeds"].items():
        table.add_row(name, *("-" if row[c] is None else str(row[c]) for c in columns))
    console.print(table)
    for name in ("not_correct", "void", "disturbed", "slowest", "highest_share", "highest_eager_share", "spread_worst", "ceilings"):
        console.print(f"[bold]{name}[/bold]", len(found[name]))
        for item in found[name][:20]:
            console.print(f"  {item}"[:400], highlight=False, markup=False, soft_wrap=True)
    for name in ("exclusive_mean_seconds", "spread_median"):
        value = found[name]
        console.print(f"[bold]{name}[/bold]", "unknown" if value is None or math.isnan(value) else f"{value:.3f}")


def chosen(a: argparse.Namespace) -> list[str]:
    """Return the ids of the tasks that a command asks for, in the order in which they are graded."""
    if a.tasks_from is not None:
        packs.select(a.tasks_from)
    patterns = [p.strip() for p in a.tasks.split(",")]
    tasks = [t for t in task_ids() if any(fnmatch.fnmatch(t, p) for p in patterns)]
    random.Random(a.seed).shuffle(tasks)
    return tasks[: a.count]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; exit status 0 if every grading is correct and none is void, 1 if not, 2 on bad usage."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT.jsonl")
    parser.add_argument("--tasks", default="*", help="comma-separated patterns of task ids (default: all)")
    parser.add_argument("--tasks-from", metavar="PACK", help="task packs: folders or names, comma-separated (default: KBX_TASKS)")
    parser.add_argument("--workers", type=int, default=14, help="gradings at a time on each GPU")
    parser.add_argument("--gpus", type=int, default=1, help="number of GPUs")
    parser.add_argument("--seed", type=int, default=0, help="of the order of the tasks")
    parser.add_argument("--runs", type=int, default=1, help="runs in a row")
    parser.add_argument("--load", action="store_true", help="keep every core busy during the last run")
    parser.add_argument("--seconds", type=float, default=math.inf, help="limit of one run; the rest is listed as unfinished")
    parser.add_argument("--phases", action="store_true", help="record the steps of exclusive use of the GPU")
    parser.add_argument("--turns", metavar="N,S", help="rhythm of the GPU lock; needs --phases")
    parser.add_argument("--count", type=int, default=1000, help="of the tasks, in the order of --seed")
    parser.add_argument("--precision", default="report", choices=PRECISIONS, help="of the times (default: report)")
    a = parser.parse_args(argv)
    if a.turns:
        os.environ[TURNS] = a.turns
    try:
        tasks = chosen(a)
        if not tasks:
            raise UsageError(f"--tasks {a.tasks!r} matches no task; patterns look like 'math/*'")
        if min(a.workers, a.runs, a.gpus) < 1:
            raise UsageError("--workers, --runs and --gpus are at least 1")
        if a.turns and (not a.phases or not re.fullmatch(r"\d+,\d*\.?\d+", a.turns)):
            raise UsageError(f"--turns {a.turns!r}: write it as 8,0.75, together with --phases")
        uuids_of(a.gpus)
        graded = kernels(tasks)
    except UsageError as e:
        print(f"experts_timed.py: {e}", file=sys.stderr)
        return 2
    rows: list[dict[str, Any]] = []
    walls: list[float] = []
    loads: list[bool] = []
    a.out.parent.mkdir(parents=True, exist_ok=True)
    limit = a.seconds if a.seconds < math.inf else 86_400.0
    with a.out.open("w") as out:
        for run in range(1, a.runs + 1):
            loads.append(a.load and run == a.runs)
            start = time.perf_counter()
            with load_on_all_cores(loads[-1]):
                sources = {task: one["source"] for task, one in graded.items()}
                about = {task: {k: v for k, v in one.items() if k != "source"} for task, one in graded.items()}
                rows += run_once(run, sources, a.gpus, a.workers, out, limit, a.phases, a.precision, about)
            walls.append(time.perf_counter() - start)
        found = summary(rows, walls, a.workers, loads) | {"precision": a.precision, "gpus": a.gpus}
        out.write(jsonl.encode({"summary": found}))
    tell(found, Console(width=160))
    return 0 if not found["not_correct"] and not found["void"] else 1


if __name__ == "__main__":
    sys.exit(main())
