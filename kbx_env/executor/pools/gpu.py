"""Several GPUs of this machine as one place to grade: worker processes that see one GPU each, on cores beside it."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Sequence

from kbx_env.errors import UsageError
from kbx_env.executor.pools import cpu_affinity
from kbx_env.executor.pools.process import GRADER, ProcessPool, Request, WorkerLost, WorkerPool, spent
from kbx_env.outcome import Outcome

Told = Callable[[Request, int, int, float, float], None]
"""Called after every attempt: the request, its GPU and worker, begin and end (``time.perf_counter``)."""
REST = (0.5, 30.0)
"""Seconds for which a GPU that lost a request at once gets no other one while another GPU does not rest: doubled with each loss
in a row, up to the second number."""
SOON = 0.5
"""Share of the deadline before which a loss is the GPU's: later it may be the request that took too long."""


class GpuPool:
    """One lane for each GPU, seen as one. A GPU whose workers fail at once would else draw most of the work, and lose it."""

    def __init__(self, lanes: Sequence[WorkerPool]) -> None:
        self._lanes, self.width = list(lanes), sum(lane.width for lane in lanes)
        self.told: Told | None = None
        self.cores: list[list[int]] | None = None
        """Of each GPU's workers; ``None``: where the system likes."""
        self._changed = threading.Condition()
        # The first worker of every GPU, then the second of every GPU: few requests are spread over all GPUs.
        self._idle = [(gpu, k) for k in range(max(n.width for n in lanes)) for gpu, n in enumerate(lanes) if k < n.width]
        self._losses, self._rests, self._closed = [0] * len(lanes), [0.0] * len(lanes), False

    def grade(self, request: Request, deadline: float) -> Outcome:
        """Grade on the GPU whose worker has waited longest."""
        gpu, worker = self._take()
        begin, lost = time.perf_counter(), False
        try:
            outcome = self._lanes[gpu].grade(request, deadline)
            lost = spent(outcome)
            return outcome
        except WorkerLost:
            lost = time.perf_counter() - begin < SOON * deadline
            raise
        finally:
            self._give(gpu, worker, lost)
            if self.told is not None:
                self.told(request, gpu, worker, begin, time.perf_counter())

    def _take(self) -> tuple[int, int]:
        with self._changed:
            while True:
                now = time.monotonic()
                rested = [place for place in self._idle if self._rests[place[0]] <= now]
                if self._idle and not rested and (self._closed or min(self._rests) > now):
                    # There is none to leave the work to: what rests least.
                    rested = [min(self._idle, key=lambda place: self._rests[place[0]])]
                if rested:
                    self._idle.remove(rested[0])
                    return rested[0]
                waits = [self._rests[gpu] - now for gpu, _ in self._idle]
                self._changed.wait(min(waits, default=None))

    def _give(self, gpu: int, worker: int, lost: bool) -> None:
        with self._changed:
            self._idle.append((gpu, worker))
            now, (first, longest) = time.monotonic(), REST
            if not lost:
                self._losses[gpu], self._rests[gpu] = 0, 0.0
            elif self._rests[gpu] <= now and not self._closed:  # several workers may have been lost to one cause
                self._losses[gpu] += 1
                self._rests[gpu] = now + min(longest, first * 2 ** min(self._losses[gpu] - 1, 10))
            self._changed.notify_all()

    def close(self) -> None:
        """End every lane."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        with contextlib.ExitStack() as stack:  # one that fails leaves none open
            for lane in self._lanes:
                stack.callback(lane.close)


def gpu_pool(gpus: int, workers: int, grader: str = GRADER, uuids: Sequence[str] = ()) -> GpuPool:
    """Worker processes that see one GPU each; with 0 GPUs, one lane of processes that see none.

    Args:
        gpus: how many, of those that this process sees.
        workers: gradings at a time on each.
        grader: see ``ProcessPool``.
        uuids: of the GPUs (``uuids_of``), to find the cores beside them.

    Raises:
        UsageError: fewer GPUs are visible.
    """
    mine = len(os.sched_getaffinity(0))
    threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, mine // (max(gpus, 1) * workers)))
    # The numbers of the GPUs that this process sees, which need not begin at 0.
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [n.strip() for n in shown.split(",") if n.strip()] if shown else [str(k) for k in range(gpus)]
    seen = names[:gpus] if gpus else [""]
    if len(seen) < gpus:
        raise UsageError(f"CUDA_VISIBLE_DEVICES={shown!r} shows {len(seen)} GPUs, {gpus} are asked for")
    each = [{"CUDA_VISIBLE_DEVICES": name, "OMP_NUM_THREADS": threads} for name in seen]
    beside = cpu_affinity.shares(uuids or [""] * gpus) if gpus > 1 else [None] * len(each)
    with contextlib.ExitStack() as stack:
        lanes = []
        for env, c in zip(each, beside, strict=True):
            lanes.append(ProcessPool(workers, grader, env=env, cores=c))
            stack.callback(lanes[-1].close)
        made = GpuPool(lanes)
        stack.pop_all()
    made.cores = [sorted(c) for c in beside if c] or None
    return made


def uuids_of(gpus: int) -> list[str]:
    """Ids of the first so many GPUs as the driver knows them.

    Raises:
        UsageError: there are fewer, or they are of different models: what is measured on them could not be compared.
    """
    if gpus < 0:
        raise UsageError(f"--gpus is {gpus}; 0 or more")
    if not gpus:
        return []
    import torch

    there = torch.cuda.device_count()
    if there < gpus:
        raise UsageError(f"--gpus is {gpus}, torch finds {there} on this machine (of parts of a GPU one at a time)")
    models = {torch.cuda.get_device_name(k) for k in range(gpus)}
    if len(models) > 1:
        raise UsageError(f"--gpus {gpus} are of different models ({', '.join(sorted(models))}); choose with CUDA_VISIBLE_DEVICES")
    found = [str(getattr(torch.cuda.get_device_properties(k), "uuid", "")) for k in range(gpus)]
    return [u if not u or u.startswith(("GPU-", "MIG-")) else f"GPU-{u}" for u in found]
