"""Simulates a cluster of graders: replays the recorded stage times of real requests over any number of GPUs.

``python eval/throughput.py --simulate RESULT.json`` and ``--check REAL.json...`` are its command line. The model:

- a free worker takes a request from the one queue; this costs the one dispatcher ``dispatch`` seconds;
- the request keeps its worker to the end. One after the other, it needs a core of its GPU's share (screen, proof,
compilation), its GPU together with others (calls, and one half of ``shared`` as it was recorded), its GPU ``alone``
(timing), its GPU together with others again (the judges, the other half), and its worker without anything else (the way
back). Waiting requests are served in order of arrival;
- the GPU's lock has the rules of ``kbx_env/grading/timing/gpu_lock.py``: batches of gradings that have it alone, a window
for the others after each batch, and sharers that give way;
- correctness runs do not slow each other down. Times are as recorded, so that they contain the slowdown of the recorded
run.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kbx_env.errors import UsageError
from kbx_env.grading.timing.gpu_lock import (
    CROWD,
    EXCLUSIVE_BATCH,
    IDLE_SECONDS,
    LEAST_WINDOW_SECONDS,
    SHARED_WINDOW_SECONDS,
)
from kbx_env.outcome import Verdict

DISPATCH_MS = 1.0
"""Milliseconds of the dispatcher for a request if they were not measured."""
ROUNDS = 50
"""Requests for each worker of a simulated cluster: enough that the idle time at the end weighs little."""
TURN_SECONDS = 0.12
"""Seconds after which a sharer gives way, if a grading waits to be alone: the mean length of a shared hold on an H200
(docs/measurements/2026-11-26-h200.md)."""
_CORE, _SHARED, _ALONE, _JUDGED, _SLOT, _DONE = range(6)
_TIMER = -2


@dataclass(frozen=True, slots=True)
class Job:
    """The resources that one request needs, in seconds and in this order.

    Attributes:
        core: on a core.
        shared: on its GPU, next to others.
        alone: on its GPU, alone.
        slot: in its worker, without anything else.
        judged: whether it ends with a verdict on the kernel (no infrastructure fault).
    """

    core: float = 0.0
    shared: float = 0.0
    alone: float = 0.0
    slot: float = 0.0
    judged: bool = True

    @property
    def seconds(self) -> float:
        """Duration without any wait."""
        return self.core + self.shared + self.alone + self.slot


@dataclass(frozen=True)
class Shape:
    """A cluster.

    Attributes:
        gpus: number of GPUs, at least 1.
        workers: for each GPU.
        cores: for each GPU.
        dispatch: seconds of the one dispatcher for a request.
    """

    gpus: int = 1
    workers: int = 1
    cores: int = 1
    dispatch: float = 0.0


@dataclass(frozen=True)
class Course:
    """A simulated run.

    Attributes:
        seconds: of the run.
        judged: kernels with a verdict.
        taken: for each request in the order of the queue, when a worker took it, in seconds from the start.
        ended: for each request in the order of the queue, when it ended, in seconds from the start.
    """

    seconds: float
    judged: int
    taken: Sequence[float]
    ended: Sequence[float]

    @property
    def rate(self) -> float | None:
        """Kernels judged in a second; ``None`` if the run took no time."""
        return self.judged / self.seconds if self.seconds else None

    def latency(self, share: float) -> float | None:
        """Return a quantile of the seconds from the moment a worker takes a request to its verdict."""
        if not self.ended:
            return None
        return float(np.quantile(np.asarray(self.ended) - np.asarray(self.taken), share))


class _Gpu:
    """One GPU with its cores: the slots that hold them, and the slots that wait for them."""

    __slots__ = ("alone", "batch", "cores", "for_alone", "for_core", "for_shared", "sharing", "window")

    def __init__(self, cores: int) -> None:
        self.cores, self.sharing, self.alone, self.batch = cores, 0, False, 0
        self.for_core: deque[int] = deque()
        self.for_shared: deque[tuple[int, int]] = deque()
        self.for_alone: deque[int] = deque()
        self.window = (0.0, 0.0)
        """Begin and end of the last window in which the GPU is shared although a grading waits to be alone."""

    def free_core(self) -> int | None:
        """Give back a core; return the slot that gets it."""
        if self.for_core:
            return self.for_core.popleft()
        self.cores += 1
        return None

    def take_core(self, slot: int) -> bool:
        """Return whether a slot gets a core; if not, it waits."""
        if self.cores:
            self.cores -= 1
            return True
        self.for_core.append(slot)
        return False

    def wait(self, step: int, slot: int) -> None:
        """Let a slot wait for the GPU."""
        if step == _ALONE:
            self.for_alone.append(slot)
        else:
            self.for_shared.append((slot, step))

    def gives_way(self, now: float) -> bool:
        """Return whether sharers leave the GPU to a grading that waits to be alone."""
        return bool(self.for_alone) and now >= self.window_end()

    def window_end(self) -> float:
        """Return when the last window ends or has ended: early, when a crowd waits to be alone."""
        opened, ends = self.window
        return ends if len(self.for_alone) < CROWD else min(ends, opened + LEAST_WINDOW_SECONDS)

    def leave_alone(self, now: float) -> None:
        """End an exclusive use; a window opens for waiting sharers after a batch."""
        self.alone = False
        over = self.batch >= EXCLUSIVE_BATCH or not self.for_alone
        left = now < self.window_end()
        if self.for_shared and over and not left:
            self.window = (now, now + SHARED_WINDOW_SECONDS)
        if over or left or not self.for_shared:
            self.batch = 0

    def admit(self, now: float) -> list[tuple[int, int]]:
        """Return the (slot, step) that begin now, which have the GPU."""
        if self.alone:
            return []
        begun = []
        opened, ends = self.window[0], self.window_end()
        if not self.gives_way(now):
            begun = list(self.for_shared)
            self.for_shared.clear()
            self.sharing += len(begun)
        idle = now >= ends or now - opened >= IDLE_SECONDS - 1e-9
        if self.for_alone and not self.sharing and idle:
            self.alone, self.batch = True, self.batch + 1
            begun = [(self.for_alone.popleft(), _ALONE)]
        return begun

    def next_look(self, now: float) -> float | None:
        """Return when the lock looks again by itself: in a window in which a grading waits to be alone."""
        opened, ends = self.window[0], self.window_end()
        if self.alone or not self.for_alone or now >= ends:
            return None
        return min(opened + IDLE_SECONDS if now < opened + IDLE_SECONDS - 1e-9 else ends, ends)


class _Simulation:
    """A run in progress: a heap of events (seconds, number, slot, step), the GPUs, and the job that each slot holds.

    A slot is a worker of a GPU; slot ``s`` belongs to GPU ``s % gpus``.
    """

    def __init__(self, jobs: Sequence[Job], shape: Shape) -> None:
        self.shape = shape
        # Without timing all shared use is before it.
        self.needs = [
            (j.core, j.shared / 2 if j.alone else j.shared, j.alone, j.shared / 2 if j.alone else 0.0, j.slot) for j in jobs
        ]  # fmt: skip
        self.gpus = [_Gpu(shape.cores) for _ in range(shape.gpus)]
        self.slots = shape.gpus * shape.workers
        self.holds = [0] * self.slots
        self.left = [0.0] * self.slots
        self.looks = [math.inf] * shape.gpus
        self.taken, self.ended = [0.0] * len(jobs), [0.0] * len(jobs)
        self.events: list[tuple[float, int, int, int]] = []
        self.dispatcher_free = 0.0
        self.next_job = self.pushed = 0

    def run(self) -> None:
        """Play until no event is left."""
        # The first worker of every GPU, then the second of every GPU: few requests are spread over all GPUs.
        for slot in range(min(self.slots, len(self.needs))):
            self.fetch(0.0, slot)
        while self.events:
            now, _, slot, step = heapq.heappop(self.events)
            number = slot % self.shape.gpus
            gpu = self.gpus[number]
            if step == _TIMER:
                self.looks[number] = math.inf
            elif step in (_SHARED, _JUDGED) and self.stays(now, slot, step, gpu):
                continue
            else:
                if step == _CORE and (other := gpu.free_core()) is not None:
                    self.push(now + self.needs[self.holds[other]][_CORE], other, _CORE)
                elif step == _ALONE:
                    gpu.leave_alone(now)
                if not (step in (_SHARED, _JUDGED) and self.left[slot] > 0):
                    self.advance(now, slot, step + 1)
            self.admit(now, number)

    def stays(self, now: float, slot: int, step: int, gpu: _Gpu) -> bool:
        """End a turn of a sharer; return whether its next turn begins at once. One that gives way waits again."""
        self.left[slot] = round(self.left[slot] - min(self.left[slot], TURN_SECONDS), 12)
        if self.left[slot] and not gpu.gives_way(now):
            self.push(now + min(self.left[slot], TURN_SECONDS), slot, step)
            return True
        gpu.sharing -= 1
        if self.left[slot]:
            gpu.wait(step, slot)
        return False

    def admit(self, now: float, number: int) -> None:
        """Let those begin that the lock of a GPU admits."""
        gpu = self.gpus[number]
        for slot, step in gpu.admit(now):
            seconds = self.needs[self.holds[slot]][_ALONE] if step == _ALONE else min(self.left[slot], TURN_SECONDS)
            self.push(now + seconds, slot, step)
        look = gpu.next_look(now)
        if look is not None and look < self.looks[number]:
            self.looks[number] = look
            self.push(look, number, _TIMER)

    def push(self, now: float, slot: int, step: int) -> None:
        """Add the end of a step, or of a sharer's turn."""
        heapq.heappush(self.events, (now, self.pushed, slot, step))  # the number keeps the order of simultaneous events
        self.pushed += 1

    def fetch(self, now: float, slot: int) -> None:
        """Let the dispatcher hand the next job to a slot."""
        if self.next_job < len(self.needs):
            self.holds[slot], self.taken[self.next_job] = self.next_job, max(now, self.dispatcher_free)
            self.dispatcher_free = self.taken[self.next_job] + self.shape.dispatch
            self.next_job += 1
            self.push(self.dispatcher_free, slot, _CORE - 1)

    def advance(self, now: float, slot: int, step: int) -> None:
        """Begin a slot's next step, or its wait for a core or the GPU, or its next job."""
        need = self.needs[self.holds[slot]]
        while step < _DONE and not need[step]:
            step += 1
        gpu = self.gpus[slot % self.shape.gpus]
        if step == _DONE:
            self.ended[self.holds[slot]] = now
            self.fetch(now, slot)
        elif step == _SLOT or (step == _CORE and gpu.take_core(slot)):
            self.push(now + need[step], slot, step)
        elif step != _CORE:
            self.left[slot] = need[step]
            gpu.wait(step, slot)


def play(jobs: Sequence[Job], shape: Shape) -> Course:
    """Simulate jobs that all wait in the queue from the start.

    Args:
        jobs: in the order of the queue.
        shape: the cluster.

    Returns:
        The course of the run; the same for the same arguments.

    Raises:
        UsageError: a cluster without GPUs, workers or cores, or a negative time.
    """
    if min(shape.gpus, shape.workers, shape.cores) < 1 or shape.dispatch < 0:
        raise UsageError(f"{shape}: gpus, workers and cores are at least 1, dispatch is not negative")
    if any(min(j.core, j.shared, j.alone, j.slot) < 0 for j in jobs):
        raise UsageError("a recorded time is negative")
    simulation = _Simulation(jobs, shape)
    simulation.run()
    return Course(max(simulation.ended, default=0.0), sum(j.judged for j in jobs), simulation.taken, simulation.ended)


def bounds(jobs: Sequence[Job], shape: Shape) -> dict[str, float]:
    """Return the kernels per second that each resource allows at most, in any order of the requests; the lowest binds.

    It holds for runs with the same mix of requests.

    Args:
        jobs: the requests.
        shape: the cluster.

    Returns:
        Resource -> kernels per second.
    """
    n = len(jobs)
    share = sum(j.judged for j in jobs) / n if n else 0.0
    mean = {k: sum(getattr(j, k) for j in jobs) / n if n else 0.0 for k in ("core", "shared", "alone", "seconds")}
    needs = {
        "workers": (mean["seconds"] + shape.dispatch) / (shape.gpus * shape.workers),
        "cores": mean["core"] / (shape.gpus * shape.cores),
        # At best, all workers of a GPU share it at the same time.
        "gpu": (mean["alone"] + mean["shared"] / shape.workers) / shape.gpus,
        "dispatch": shape.dispatch,
    }
    return {name: share / s for name, s in needs.items() if s > 0}


def job_of(row: Mapping[str, Any], backend: str, dispatch: float) -> Job:
    """Return the resources that a recorded request needs.

    Args:
        row: of ``requests`` in the JSON of ``eval/throughput.py``.
        backend: of the recorded run: on ``cpu``, everything needs a core.
        dispatch: seconds of the dispatcher, for which the worker waited as well and which are not counted twice.

    Returns:
        The job.

    Raises:
        KeyError: the row lacks ``seconds``, ``begin``, ``end`` or ``verdict``.
    """
    seconds = {k: float(v) for k, v in row["seconds"].items()}
    held = float(row["end"]) - float(row["begin"])
    total = seconds.pop("total", 0.0)
    on_gpu = backend == "cuda"
    # Waits for the GPU depend on the other gradings: the simulation has its own.
    waited = seconds.get("waited", 0.0)
    alone = seconds.get("alone", 0.0) if on_gpu else 0.0
    shared = seconds.get("shared", 0.0) if on_gpu else 0.0
    core = max(total - waited - alone - shared, 0.0)
    # Outside the grader: the way there and back, or a lost grading, whose stages are not known.
    slot = max(held - core - shared - alone - waited - dispatch, 0.0)
    return Job(core, shared, alone, slot, row["verdict"] != Verdict.INFRA_FAULT)


def dispatch_of(result: Mapping[str, Any], given_ms: float | None = None) -> float:
    """Return the seconds of the dispatcher for a request.

    Args:
        result: of ``eval/throughput.py``.
        given_ms: milliseconds that replace the measured ones.

    Returns:
        Seconds: as given, else as measured, else 1 ms.
    """
    for ms in (given_ms, result.get("dispatch_ms")):
        if ms is not None:
            return float(ms) / 1000
    return DISPATCH_MS / 1000


def jobs_of(result: Mapping[str, Any], dispatch: float) -> list[Job]:
    """Return the recorded requests of a result.

    Args:
        result: of ``eval/throughput.py``.
        dispatch: seconds of the dispatcher for a request.

    Returns:
        A job for each request.

    Raises:
        UsageError: it is no result of ``eval/throughput.py``, or holds no request.
    """
    try:
        jobs = [job_of(r, result["backend"], dispatch) for r in result["requests"]]
    except (KeyError, TypeError, ValueError, AttributeError) as e:
        raise UsageError(f"not a result of eval/throughput.py --json ({type(e).__name__}: {e})") from e
    if not jobs:
        raise UsageError("the result holds no request that ended; record a longer run")
    return jobs


def shape_of(result: Mapping[str, Any], dispatch: float, cores: int | None = None) -> Shape:
    """Return the cluster on which a result was recorded.

    Args:
        result: of ``eval/throughput.py``.
        dispatch: seconds of the dispatcher for a request.
        cores: for each GPU; by default the GPUs share the machine's cores equally.

    Returns:
        The cluster.
    """
    gpus = max(1, int(result["gpus"]))
    return Shape(gpus, int(result["workers"]), cores or max(1, int(result["cores"]) // gpus), dispatch)


def repeated(jobs: Sequence[Job], count: int, seed: int = 0) -> list[Job]:
    """Return a number of jobs: the recorded ones again and again, in another order each time.

    Args:
        jobs: the recorded ones.
        count: how many.
        seed: of the order.

    Returns:
        The jobs.
    """
    rng, found = random.Random(seed), list[Job]()
    while len(found) < count:
        found += rng.sample(list(jobs), len(jobs))
    return found[:count]


def plan(
    jobs: Sequence[Job], gpus: Sequence[int], shape: Shape, count: int | None = None, seed: int = 0
) -> list[dict[str, Any]]:
    """Simulate clusters of several sizes.

    Args:
        jobs: the recorded requests.
        gpus: numbers of GPUs.
        shape: workers and cores for each GPU, and the dispatcher; its ``gpus`` are ignored.
        count: requests of each simulated run; by default the recorded ones as often as needed to have 50 for each
            worker.
        seed: of their order.

    Returns:
        A row for each number of GPUs: ``gpus``, ``requests``, ``kernels_per_second``, ``efficiency`` (relative to one
        GPU times their number), ``p50`` and ``p95`` (seconds from the moment a worker takes a request to its verdict)
        and ``bound`` (name of the lowest of ``bounds``).
    """

    def one(n: int) -> tuple[Course, dict[str, float]]:
        at = Shape(n, shape.workers, shape.cores, shape.dispatch)
        # Whole rounds of the recorded requests: every size of cluster gets the same mix.
        rounds = max(1, math.ceil(ROUNDS * n * shape.workers / len(jobs)))
        return play(repeated(jobs, count or rounds * len(jobs), seed), at), bounds(jobs, at)

    base = one(1)[0].rate
    rows = []
    for n in gpus:
        course, limits = one(n)
        rate = course.rate
        rows.append({
            "gpus": n, "requests": len(course.ended), "kernels_per_second": rate,
            "efficiency": rate / (n * base) if rate is not None and base else None,
            "p50": course.latency(0.5), "p95": course.latency(0.95),
            "bound": min(limits, key=lambda k: limits[k]) if limits else None,
        })  # fmt: skip
    return rows


def check(result: Mapping[str, Any], jobs: Sequence[Job], own: bool, shape: Shape) -> dict[str, Any]:
    """Compare a recorded run with its simulation.

    Args:
        result: the recorded run.
        jobs: the requests to simulate.
        own: whether they are the run's own, in its order; otherwise they are repeated up to its number of requests.
        shape: of the run.

    Returns:
        ``measured`` and ``simulated`` kernels per second and ``error``, the relative difference; ``None`` if unknown.
    """
    asked = len(result["requests"])
    course = play(jobs if own else repeated(jobs, asked), shape)
    measured = result.get("kernels_per_second")
    error = course.rate / measured - 1 if course.rate is not None and measured else None
    return {
        "gpus": int(result["gpus"]), "workers": shape.workers, "requests": asked, "measured": measured,
        "simulated": course.rate, "error": error,
    }  # fmt: skip
