"""Two tiers as a schedule: gradings a second and GPU seconds a grading, with and without CPU screening.

    python benchmarks/service_tiers.py --correct 0.1 0.6 --screeners 16     # simulated
    python benchmarks/service_tiers.py --correct 0.1 0.6 --real 60          # real proofs, a simulated GPU stage
    python benchmarks/service_tiers.py --correct 0.1 0.6 --cuda 80          # all is real: one GPU, 16 cores more for proofs

Three schedules of the same workload on one GPU machine, by ``eval/simulate.py``:

- ``gpu only``: no CPU tier at all (the layer ``proof`` left out); wrong kernels are compiled and judged on the GPU;
- ``one machine``: the GPU machine's own workers make the proof first, as every grading on CUDA does;
- ``two tiers``: ``kbx serve --screen-url``: other cores make the proofs, and only survivors take a worker of the GPU.

The stage times are means of recorded runs on an H200 (docs/measurements/2026-11-25-h200-timing.md, run a): a correct kernel
has 6.8 s of a core, 1.9 s of the shared GPU and 0.68 s of the GPU alone. The proof is taken as a third of the core seconds,
which is its share of proof and compilation in docs/measurements/2026-11-22-h200-x2.md. It is an assumption for a loaded machine.

With ``--real`` nothing but the GPU is simulated: ``TieredPool`` itself, real worker processes, and real proofs on the CPU tier of
experts and of experts that store a multiple of the result. The GPU stage of a kernel sleeps: ``SHARED`` seconds, and for a
correct kernel ``ALONE`` seconds in which no other kernel is on the GPU. All cores of this machine make proofs.

With ``--cuda`` nothing is simulated: the workers of the first GPU have ``--cores`` cores, and ``--screeners`` workers the others.
Gradings are timed in training precision. GPU seconds are those for which gradings held the GPU's lock, shared or alone.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import itertools
import json
import os
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from kbx_env.eval.simulate import Job, Shape, play

from kbx_env.executor import GRADER, Executor, ProcessPool, Request
from kbx_env.executor.pools.tiered import TieredPool
from kbx_env.options import GradeOptions
from kbx_env.outcome import Cases, Fault, Outcome, Stage, Verdict
from kbx_env.spec.catalog import expert_source

CORE, SHARED, ALONE = 6.8, 1.9, 0.68
"""Seconds of a correct kernel: 17.2 s from begin to end, less 7.8 s of waiting, less the GPU; shared; alone."""
PROOF = CORE / 3
"""Seconds of a core for the proof on the CPU tier."""


def schedules(correct: float, screeners: int, shape: Shape, count: int) -> list[dict[str, float | str]]:
    """Simulate the three schedules.

    Args:
        correct: share of correct kernels.
        screeners: workers of the other machine.
        shape: of the GPU machine.
        count: requests.

    Returns:
        A row for each schedule.
    """
    rng = random.Random(0)
    right = [rng.random() < correct for _ in range(count)]
    survivor = Job(CORE - PROOF, SHARED, ALONE)
    jobs = {
        "gpu only": [survivor if r else Job(CORE - PROOF, SHARED) for r in right],
        "one machine": [Job(CORE, SHARED, ALONE) if r else Job(PROOF) for r in right],
        "two tiers": [survivor for r in right if r],
    }
    rows: list[dict[str, float | str]] = []
    for name, todo in jobs.items():
        seconds = play(todo, shape).seconds
        if name == "two tiers":  # screening runs beside it
            seconds = max(seconds, count * PROOF / screeners)
        held = sum(j.shared + j.alone for j in todo)
        alone = sum(j.alone for j in todo)
        rows.append({
            "correct": correct, "schedule": name, "gradings_per_second": round(count / seconds, 2),
            "gpu_seconds_per_grading": round(held / count, 2), "of_them_alone": round(alone / count, 3),
            "gpu_core_seconds_per_grading": round(sum(j.core for j in todo) / count, 2),
        })  # fmt: skip
    return rows


class SimulatedGpu:
    """Workers of one GPU that sleep in place of a kernel.

    Attributes:
        width: workers.
        requests: submissions that took a worker.
        held: seconds for which submissions held the GPU, shared or alone.
    """

    def __init__(self, width: int, proofs: ProcessPool | None = None, right: frozenset[bytes] = frozenset()) -> None:
        """Make the workers.

        Args:
            width: workers.
            proofs: make the proof of a request that has none, as the workers of a GPU machine do; ``None``: no CPU tier at all.
            right: sources that are correct; for a request without a proof.
        """
        self.width, self.requests, self.held = width, 0, 0.0
        self._proofs, self._right, self._lock = proofs, right, threading.Lock()
        self._cores = threading.BoundedSemaphore(proofs.width if proofs else width)
        self._gpu = threading.Condition()
        self._sharing = self._wanted = 0

    def grade(self, request: Request, deadline: float) -> Outcome:
        """Make the proof, if it is missing, and sleep."""
        with self._lock:
            self.requests += 1
        proof = request.proof
        if proof is None and self._proofs is not None:
            with self._cores:
                proof = self._proofs.grade(dataclasses.replace(request, options={**request.options, "backend": "cpu"}), deadline)
            if not proof.correct:
                return proof
        correct = proof.correct if proof is not None else request.source in self._right
        with self._gpu:
            self._gpu.wait_for(lambda: not self._wanted)
            self._sharing += 1
        time.sleep(SHARED)
        with self._gpu:
            self._sharing -= 1
            self._gpu.notify_all()
            if correct:
                self._wanted += 1  # nobody else begins until this one had the GPU alone
                self._gpu.wait_for(lambda: self._sharing == 0)
                time.sleep(ALONE)
                self._wanted -= 1
                self._gpu.notify_all()
        with self._lock:
            self.held += SHARED + ALONE * correct
        if proof is not None:
            return proof
        verdict, fault = (Verdict.CORRECT, None) if correct else (Verdict.INCORRECT, Fault.POLICY)
        return Outcome(request.task, verdict, Stage.CORRECT, "cuda", "contract", fault, cases=Cases(1, 1 + (not correct)))

    def close(self) -> None:
        """Close the workers that make proofs."""
        if self._proofs is not None:
            self._proofs.close()


_TASKS = (
    "math/exp_sqrt", "math/sqrt_exp", "math/log", "math/add", "math/rad2deg_sqrt", "reduce/mean", "matrixmultiply/matmul",
    "math/chebyshev_polynomial_t",
)  # fmt: skip


def scaled(source: str, factor: int) -> str:
    """Return a kernel that stores a multiple of its results."""
    data = source.encode()
    starts = [0, *itertools.accumulate(len(line) for line in data.splitlines(keepends=True))]
    stores = [
        node.args[1] for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "tl.store"
    ]  # fmt: skip
    for value in sorted(stores, key=lambda v: (v.lineno, v.col_offset), reverse=True):
        assert value.end_lineno and value.end_col_offset
        begin, end = starts[value.lineno - 1] + value.col_offset, starts[value.end_lineno - 1] + value.end_col_offset
        data = data[:begin] + b"(" + data[begin:end] + b") * %d" % factor + data[end:]
    return data.decode()


def workload(correct: float, count: int) -> list[tuple[str, bytes]]:
    """Return distinct experts and wrong versions of experts, in a random order that is always the same."""
    made, rights = [], round(correct * count)
    for k in range(count):
        task, number = _TASKS[k % len(_TASKS)], k // len(_TASKS)
        source = expert_source(task)
        if k >= rights:
            source = scaled(source, number + 2)
        made.append((task, f"# {k}\n{source}".encode()))
    random.Random(1).shuffle(made)
    return made


def graded(
    pool: Any, sources: Sequence[tuple[str, bytes]], options: Mapping[str, Any]
) -> tuple[dict[bytes, Outcome], float]:  # fmt: skip
    """Grade a workload, all of it submitted at once.

    Args:
        pool: a worker pool, which is closed at the end.
        sources: (task, source) of each submission; sources are distinct.
        options: of all gradings.

    Returns:
        The outcome of each source, and wall seconds from the first submission to the last outcome.
    """
    with Executor(pool, capacity=len(sources)) as executor:
        begin = time.monotonic()
        futures = {source: executor.submit(Request(task, source, dict(options))) for task, source in sources}
        outcomes = {source: future.result() for source, future in futures.items()}
        return outcomes, time.monotonic() - begin


def measured(correct: float, count: int, workers: int) -> list[dict[str, Any]]:
    """Grade a workload by three schedules.

    Args:
        correct: share of experts without a fault.
        count: submissions.
        workers: of the GPU.

    Returns:
        A row for each schedule.
    """
    cores, sources = os.cpu_count() or 1, workload(correct, count)
    options = dataclasses.asdict(GradeOptions.of({"backend": "cpu", "targets": (), "timing": False}).resolved())
    options["backend"] = "cuda"
    rows, verdicts, right = list[dict[str, Any]](), dict[bytes, str](), frozenset[bytes]()
    for name in ("two tiers", "one machine", "gpu only"):
        if name == "gpu only":
            gpu, pool = (made := SimulatedGpu(workers, None, right)), made
        else:
            proofs = ProcessPool(cores)
            proofs.ready(120)
            gpu = SimulatedGpu(workers, proofs if name == "one machine" else None)
            pool = gpu if name == "one machine" else TieredPool(proofs, gpu)  # type: ignore[assignment]
        outcomes, seconds = graded(pool, sources, options)
        found = {source: str(o.verdict) for source, o in outcomes.items()}
        if name == "two tiers":
            verdicts, right = found, frozenset(s for s, v in found.items() if v == "correct")
        rows.append({
            "correct": correct, "schedule": name, "gradings_per_second": round(count / seconds, 2),
            "gpu_workers_taken": gpu.requests, "gpu_seconds_per_grading": round(gpu.held / count, 2),
            "verdicts": dict(Counter(found.values())), "same_verdicts": found == verdicts if name != "gpu only" else None,
        })  # fmt: skip
    return rows


def on_gpu(correct: float, count: int, workers: int, screeners: int, cores: int) -> list[dict[str, Any]]:
    """Grade a workload by three schedules on a real GPU.

    Args:
        correct: share of experts without a fault.
        count: submissions.
        workers: of the GPU.
        screeners: workers that make proofs, in the schedule ``two tiers``.
        cores: that the workers of the GPU share; those that screen have the others.

    Returns:
        A row for each schedule.
    """
    sources, every = workload(correct, count), sorted(os.sched_getaffinity(0))
    near, far = every[:cores], every[cores:] or every
    options = dataclasses.asdict(GradeOptions.of({"backend": "cuda", "targets": (), "precision": "training"}).resolved())
    gpu_env = {"CUDA_VISIBLE_DEVICES": "0", "OMP_NUM_THREADS": "1"}
    rows, verdicts = list[dict[str, Any]](), dict[bytes, str]()
    for name in ("gpu only", "one machine", "two tiers"):
        grader = "benchmarks._service_worker:unproven" if name == "gpu only" else GRADER
        final = ProcessPool(workers, grader, env=gpu_env, cores=near)
        final.ready(120)
        pool: Any = final
        if name == "two tiers":
            screen = ProcessPool(screeners, env={"CUDA_VISIBLE_DEVICES": ""}, cores=far)
            screen.ready(120)
            pool = TieredPool(screen, final)
        outcomes, seconds = graded(pool, sources, options)
        found = {source: str(o.verdict) for source, o in outcomes.items()}
        verdicts = found if name == "one machine" else verdicts
        held = {kind: sum(o.seconds.get(kind, 0.0) for o in outcomes.values()) for kind in ("shared", "alone")}
        rows.append({
            "correct": correct, "schedule": name, "seconds": round(seconds, 1), "gradings_per_second": round(count / seconds, 2),
            "gpu_seconds_per_grading": round(sum(held.values()) / count, 2), "of_them_alone": round(held["alone"] / count, 3),
            "verdicts": dict(Counter(found.values())), "same_verdicts": found == verdicts if name == "two tiers" else None,
        })  # fmt: skip
    return rows


def main() -> None:
    """Print a row for each schedule and share, as JSON lines."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--correct", type=float, nargs="+", default=[0.1, 0.6], help="shares of correct kernels")
    p.add_argument("--screeners", type=int, default=16, help="workers that screen, on other cores")
    p.add_argument("--workers", type=int, default=14, help="workers of the GPU machine")
    p.add_argument("--cores", type=int, default=16, help="cores of the GPU machine")
    p.add_argument("--count", type=int, default=2000)
    p.add_argument("--real", type=int, metavar="N", help="grade N submissions for each share and schedule; only the GPU sleeps")
    p.add_argument("--cuda", type=int, metavar="N", help="grade N submissions for each share and schedule on the first GPU")
    a = p.parse_args()
    if a.cuda:
        for row in (r for correct in a.correct for r in on_gpu(correct, a.cuda, a.workers, a.screeners, a.cores)):
            print(json.dumps(row), flush=True)
        return
    if a.real:
        for row in (r for correct in a.correct for r in measured(correct, a.real, 4)):
            print(json.dumps(row), flush=True)
        return
    for correct in a.correct:
        for row in schedules(correct, a.screeners, Shape(1, a.workers, a.cores), a.count):
            print(json.dumps(row))


if __name__ == "__main__":
    main()
