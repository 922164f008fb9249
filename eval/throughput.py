"""Measures how many kernels a machine grades in a second and where the time goes, and simulates clusters.

    python eval/throughput.py [--workload FILE.jsonl ...] [--experts SHARE] [--count N] [--each R] [--gpus N]
                              [--workers W] [--no-timing] [--json FILE] [--trace FILE.png]
    python eval/throughput.py --simulate RESULT.json [--gpus 1,2,4,8] [--workers-per-gpu W] [--cores-per-gpu C]
    python eval/throughput.py --check REAL.json... [--simulate RESULT.json]

Rows of a workload are ``{"task", "predict"}`` (a model's answer) or ``{"task", "source"}``. Without files, the
workload is our experts, the zoo's honest kernels and the recorded samples. Every request has inputs of its own, fixed
by ``--seed`` and its number. ``--gpus 0`` is the CPU backend. Overhead is the share of the workers' time (wall x
workers) that is neither compilation nor device time (correct, evidence and time stages). ``--simulate`` replays the
recorded stage times over clusters of other sizes. Processor seconds are told by what a process does; ``not seen`` is
what short-lived processes computed after the last look at them, and what other processes of the machine did.
``--check`` compares simulated with measured rates, with the run's own times or those of ``--simulate``, and runs with
each other: with ``--each R``, R GPUs together grade R times the kernels that one GPU grades without it, in the same
order.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

from kbx_env.eval import meters, simulate, trace
from kbx_env.eval.cpu_watch import CpuWatch
from kbx_env.eval.soak import below, resident
from kbx_env.eval.workload import Piece, workload
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from kbx_env.deadlines import deadline_of
from kbx_env.errors import UnknownName, UsageError
from kbx_env.executor import GRADER, Executor, Request
from kbx_env.executor.pools.gpu import GpuPool, gpu_pool, uuids_of
from kbx_env.options import PRECISIONS
from kbx_env.outcome import Outcome
from kbx_env.spec.catalog import expert_source

WARM = "activation/relu"
"""Its expert is cheap: graded once by every worker, it starts all of them before the clock does."""


def _memory(watch: meters.GpuWatch) -> dict[str, Any]:
    return {"host_mb": round(sum(map(resident, below(os.getpid()))), 1), "gpu_mb": [m for _, m in watch.now()] or None}


def measure(
    pieces: Sequence[Piece], pools: GpuPool, options: Mapping[str, Any], *, seed: int = 0, warm: int = 0,
    deadline: float = deadline_of(timed=False), watch: meters.GpuWatch | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Grade all pieces over the worker pools; Ctrl-C ends the run early and keeps the gradings so far.

    Args:
        pieces: the workload.
        pools: the worker pools; closed at the end.
        options: of ``grade``; every request gets a ``seed`` of its own, so that equal kernels are all graded.
        seed: of the first request.
        warm: gradings of one cheap expert before the clock starts, so that every process has started.
        deadline: seconds for one grading.
        watch: samples the GPUs.

    Returns:
        The result as plain JSON types.
    """
    watch, cpu_watch = watch or meters.GpuWatch([]), CpuWatch()
    ended: dict[int, tuple[float, Outcome]] = {}
    submitted: dict[int, float] = {}
    spans: dict[int, list[tuple[int, int, float, float]]] = defaultdict(list)  # of every attempt: GPU, worker, begin, end
    pools.on_attempt = lambda request, *span: spans[request.sample].append(span)
    failed: list[BaseException] = []
    over = threading.Event()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())

    def request(k: int, piece: Piece) -> Request:
        return Request(piece.task, piece.source, {**options, "seed": seed + k}, sample=k)

    interrupted, start = False, time.perf_counter()
    with (
        Executor(pools, deadline=deadline, capacity=sys.maxsize) as executor,
        Progress(*columns, console=Console(stderr=True), refresh_per_second=2) as progress,
    ):
        bar = progress.add_task("grading", total=len(pieces))

        def done(k: int, job: Future[Outcome]) -> None:
            if over.is_set() or job.cancelled():
                return  # cut off by the end of the run
            error = job.exception()
            if error is not None:
                failed.append(error)
            else:
                ended[k] = (time.perf_counter(), job.result())
            progress.advance(bar)

        before = cpu = cores_before = None
        try:
            first = Piece(WARM, (expert_source(WARM) or "").encode(), "expert")
            for job in [executor.submit(request(len(pieces) + k, first)) for k in range(warm)]:
                job.result()
            before = _memory(watch)
            watch.start()
            cpu_watch.start()
            start, cpu, cores_before = time.perf_counter(), time.process_time(), meters.core_seconds()
            jobs = []
            for k in range(len(pieces)):
                submitted[k] = time.perf_counter()
                jobs.append(executor.submit(request(k, pieces[k])))
                jobs[-1].add_done_callback(lambda job, k=k: done(k, job))  # type: ignore[misc]
            wait(jobs)
        except KeyboardInterrupt:
            interrupted = True
        over.set()
        stop = time.perf_counter()
        cpu_watch.stop()
        used = time.process_time() - cpu - cpu_watch.own_seconds if cpu is not None else None
        cores_after = meters.core_seconds() if cores_before is not None else None
        watch.stop()
        after = _memory(watch)
    if failed:
        raise failed[0]
    rows = [_row(k, pieces[k], *ended[k], submitted[k], spans[k], start) for k in sorted(ended)]
    for r in rows:
        r["gpu"] = r["gpu"] if watch.busy() else None
    # Until the last verdict, without closing the bar and the executor.
    wall = stop - start if interrupted else max((r["end"] for r in rows), default=0.0)
    cores = cores_after - (cores_before or 0.0) if cores_after is not None else None
    return meters.summary(rows, wall, pools.width) | {
        "interrupted": interrupted, "asked": len(pieces), "gpu_busy": watch.busy() or None,
        "dispatch_ms": 1000 * used / len(rows) if used is not None and rows else None,
        "cores_busy": cores / (stop - start) if cores is not None else None,
        "cpu_seconds": cpu_watch.seconds(cores), "cpu_system_seconds": cpu_watch.system_seconds(),
        "page_faults": cpu_watch.page_faults(), "memory": {"start": before, "end": after}, "requests": rows,
    }  # fmt: skip


def _row(
    k: int, piece: Piece, at: float, outcome: Outcome, submitted: float,
    spans: Sequence[tuple[int, int, float, float]], start: float,
) -> dict[str, Any]:  # fmt: skip
    gpu, worker, _, _ = spans[-1]
    return {
        "task": piece.task, "kind": piece.kind, "verdict": str(outcome.verdict), "gpu": gpu, "worker": worker,
        "submitted": submitted - start, "begin": spans[0][2] - start, "end": at - start, "attempts": len(spans),
        "seconds": meters.stage_seconds(outcome), "message": outcome.message[:1000],
        "faults": list(outcome.manifest.get("faults", ())),
        "speedup": outcome.speedup,
        "notes": list(outcome.timing.notes) if outcome.timing else [],
    }  # fmt: skip


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--workload", nargs="+", type=Path, default=[], metavar="FILE.jsonl", help="recorded kernels")
    p.add_argument("--experts", type=float, metavar="SHARE", help="share of our own experts in the mix, 0 to 1")
    p.add_argument(
        "--count", type=int, metavar="N", help="requests (default: each kernel once; simulated: 50 a worker)"
    )
    p.add_argument("--each", type=int, default=1, metavar="R", help="so many requests of each of these, one after the other")
    p.add_argument("--seed", type=int, default=0, help="of choice, order and inputs")
    p.add_argument("--gpus", help="GPUs; 0 is the CPU backend (default: 1 where there is one); simulated: 1,2,4,...")
    p.add_argument("--workers", type=int, default=1, metavar="W", help="processes for each GPU")
    p.add_argument("--precision", default="report", choices=PRECISIONS, help="of times (default: report)")
    p.add_argument("--timing", action=argparse.BooleanOptionalAction, help="time correct kernels (default: on GPUs)")
    p.add_argument("--targets", default="sm_90", help="ahead-of-time targets, comma-separated, or none")
    p.add_argument("--wall", type=float, default=30.0, help="wall limit of one submission in seconds")
    p.add_argument("--warm", type=int, metavar="K", help="gradings before the clock starts (default: one a worker)")
    p.add_argument("--json", type=Path, metavar="FILE")
    p.add_argument("--trace", type=Path, metavar="FILE.png", help="draw the stages of each worker over time (needs matplotlib)")
    p.add_argument("--simulate", type=Path, metavar="RESULT.json", help="replay its stage times over other clusters")
    p.add_argument("--workers-per-gpu", type=int, metavar="W", help="simulated; default: as recorded")
    p.add_argument("--cores-per-gpu", type=int, metavar="C", help="simulated; default: as recorded")
    p.add_argument("--dispatch-ms", type=float, metavar="MS", help="simulated; default: as recorded, else 1")
    p.add_argument("--check", nargs="+", type=Path, metavar="REAL.json", help="simulated against measured rates")
    return p


def _versions() -> dict[str, str]:
    import torch
    import triton

    import kbx_env

    return {"kbx_env": kbx_env.__version__, "python": platform.python_version(), "torch": torch.__version__,
            "triton": triton.__version__}  # fmt: skip


def run(a: argparse.Namespace, grader: str = GRADER) -> dict[str, Any]:
    """Measure.

    Args:
        a: the command line.
        grader: ``module:class``, replaces the real one in tests.

    Returns:
        The result as plain JSON types.

    Raises:
        UsageError: an option that cannot be met.
    """
    import torch

    from kbx_env.options import TARGETS

    gpus = _integer("--gpus", a.gpus, 0) if a.gpus is not None else int(torch.cuda.is_available())
    uuids = uuids_of(gpus)
    if a.workers < 1:
        raise UsageError(f"--workers is {a.workers}; at least 1")
    if a.each < 1:
        raise UsageError(f"--each is {a.each}; at least 1")
    if a.warm is not None and a.warm < 0:
        raise UsageError(f"--warm is {a.warm}; at least 0")
    if a.timing and not gpus:
        raise UsageError("--timing needs a GPU: the CPU backend times nothing; use --no-timing or --gpus 1")
    targets = [t.strip() for t in a.targets.split(",") if t.strip() not in ("", "none")]
    for t in targets:
        if t not in TARGETS:
            raise UnknownName("target", t, TARGETS)
    if a.trace:
        trace.check()
    backend, timing = ("cuda" if gpus else "cpu"), bool(gpus) and a.timing is not False
    drawn, left_out = workload(a.workload, a.experts, a.count, a.seed, backend)
    pieces = [piece for piece in drawn for _ in range(a.each)]
    warm = a.warm if a.warm is not None else max(gpus, 1) * a.workers
    result = {
        "date": time.strftime("%Y-%m-%d"), "backend": backend, "gpus": gpus, "workers": a.workers, "timing": timing,
        "precision": a.precision,
        "device": torch.cuda.get_device_name(0) if gpus else None, "versions": _versions(),
        "machine": platform.machine(), "cores": len(os.sched_getaffinity(0)),
        "settings": {"seed": a.seed, "targets": targets, "wall": a.wall, "warm": warm, "experts": a.experts,
                     "each": a.each},
        "workload": {"files": [f.name for f in a.workload], "left_out": left_out,
                     "kinds": dict(Counter(p.kind for p in pieces))},
    }  # fmt: skip
    options = {"backend": backend, "targets": targets, "timing": timing, "wall": a.wall, "precision": a.precision}
    deadline = deadline_of(timing, a.wall)
    pools = gpu_pool(gpus, a.workers, grader, uuids)
    result["cores_of_gpus"] = pools.cores
    return result | measure(
        pieces, pools, options, seed=a.seed, warm=warm, deadline=deadline, watch=meters.GpuWatch(uuids)
    )


def _integer(name: str, text: str, least: int) -> int:
    try:
        number = int(text)
    except ValueError:
        number = least - 1
    if number < least:
        raise UsageError(f"{name} is {text!r}; a whole number, at least {least}")
    return number


def loaded(file: Path) -> dict[str, Any]:
    """Read a saved result.

    Args:
        file: of ``--json``.

    Returns:
        The result.

    Raises:
        UsageError: the file holds no result.
    """
    try:
        data = json.loads(file.read_text())
        if not isinstance(data, dict) or not all(isinstance(data[k], int) for k in ("gpus", "workers", "cores")):
            raise ValueError("gpus, workers and cores are missing")
        return data
    except (OSError, ValueError, KeyError) as e:
        raise UsageError(f"{file}: not a result of eval/throughput.py --json ({type(e).__name__}: {e})") from e


def run_simulation(a: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Simulate clusters and check simulations, and print a table of each.

    Args:
        a: the command line.
        console: where to print.

    Returns:
        The result as plain JSON types.

    Raises:
        UsageError: a file that is no result, or an impossible cluster.
    """
    result: dict[str, Any] = {}
    source = loaded(a.simulate) if a.simulate else None
    if a.dispatch_ms is not None and a.dispatch_ms < 0:
        raise UsageError(f"--dispatch-ms is {a.dispatch_ms:g}; at least 0")
    for name in ("workers_per_gpu", "cores_per_gpu", "count"):
        if getattr(a, name) is not None and getattr(a, name) < 1:
            raise UsageError(f"--{name.replace('_', '-')} is {getattr(a, name)}; at least 1")
    if source is not None and not a.check:
        dispatch = simulate.dispatch_of(source, a.dispatch_ms)
        recorded = simulate.shape_of(source, dispatch, a.cores_per_gpu)
        shape = simulate.Shape(1, a.workers_per_gpu or recorded.workers, recorded.cores, dispatch)
        gpus = [_integer("--gpus", t.strip(), 1) for t in a.gpus.split(",")] if a.gpus else [2**k for k in range(11)]
        rows = simulate.plan(simulate.jobs_of(source, dispatch), gpus, shape, a.count, a.seed)
        result["simulated"] = {
            "workers": shape.workers,
            "cores": shape.cores,
            "dispatch_ms": 1000 * dispatch,
            "rows": rows,
        }
        title = f"{shape.workers} workers and {shape.cores} cores a GPU, {1000 * dispatch:.3g} ms dispatch"
        table = Table("GPUs", "requests", "kernels/s", "efficiency", "p50 s", "p95 s", "bound by", title=title)
        for r in rows:
            rate, efficiency = meters.shown(r["kernels_per_second"], ".4g"), meters.shown(r["efficiency"], ".3f")
            latencies = meters.shown(r["p50"]), meters.shown(r["p95"])
            table.add_row(str(r["gpus"]), str(r["requests"]), rate, efficiency, *latencies, r["bound"])
        console.print(table)
    if a.check:
        rows, table = [], Table("run", "GPUs", "workers", "requests", "measured/s", "simulated/s", "error", "of the first")
        results = [loaded(file) for file in a.check]
        for file, real in zip(a.check, results, strict=True):
            dispatch = simulate.dispatch_of(source or real, a.dispatch_ms)
            jobs = simulate.jobs_of(source or real, dispatch)
            shape = simulate.shape_of(real, dispatch, a.cores_per_gpu)
            r = {"file": file.name} | simulate.check(real, jobs, source is None, shape)
            r["of_first"] = meters.beside(results[0], real)
            rows.append(r)
            table.add_row(r["file"], *(str(r[k]) for k in ("gpus", "workers", "requests")), meters.shown(r["measured"], ".4g"),
                          meters.shown(r["simulated"], ".4g"), meters.shown(r["error"], "+.1%"),
                          meters.shown(r["of_first"], ".3f"))  # fmt: skip
        console.print(table)
        result["checked"] = rows
    return result


def main(argv: Sequence[str] | None = None, grader: str = GRADER) -> int:
    """Measure or simulate; the command line's main function.

    Args:
        argv: arguments; by default those of the process.
        grader: replaces the real one in tests.

    Returns:
        Exit status: 0 on success, 2 on bad usage, 130 when interrupted (the measurements so far are reported all the
        same).
    """
    a = parser().parse_args(argv)
    console, interrupted = Console(), False
    # ``timeout`` and schedulers end a run by SIGTERM: its measurements so far are kept as well.
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        if a.simulate or a.check:
            result = run_simulation(a, console)
        else:
            result = run(a, grader)
            interrupted = result["interrupted"]
            meters.tell(result, console)
        # The numbers are written first, so that they are there if the picture fails.
        if a.json:
            a.json.write_text(json.dumps(result, indent=1))
        if a.trace and "requests" in result:
            trace.draw(result, a.trace)
    except (UsageError, OSError) as e:
        print(f"throughput: {e}", file=sys.stderr)
        return 2
    finally:
        signal.signal(signal.SIGTERM, before)
    return 130 if interrupted else 0


if __name__ == "__main__":
    sys.exit(main())
