"""A worker pool over several GPUs of this machine: worker processes that see one GPU each, on CPU cores near it."""

from __future__ import annotations

import contextlib
import importlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from kbx_env.errors import UsageError
from kbx_env.executor.pools import cpu_affinity, gpu_files
from kbx_env.executor.pools.fork_server import CLOSED
from kbx_env.executor.pools.process import GRADER, ProcessPool, Request, WorkerLost, WorkerPool, poisons_worker
from kbx_env.outcome import Outcome

OnAttempt = Callable[[Request, int, int, float, float], None]
"""Called after every attempt with the request, the numbers of its GPU and worker, and begin and end in seconds
(``time.perf_counter``)."""
REST = (0.5, 30.0)
"""First and longest rest of a GPU, in seconds. A GPU that loses a request at once gets no other request during its rest, while
another GPU does not rest. The rest doubles with each loss in a row."""
SOON = 0.5
"""Share of the deadline. A loss before it counts against the GPU; later the request itself may have taken too long."""


REMEMBERED = 256
"""Losses that are remembered, so that the next attempt at a request is made on another GPU."""


class GpuPool:
    """One pool for each GPU, used as one pool. A GPU that loses requests rests, and gets none of them again.

    Without rests, a GPU whose workers fail at once would take most of the requests, and lose them. A request that was lost with
    its GPU would be lost with it once more.

    Attributes:
        width: gradings that can run at the same time, on all GPUs.
        on_attempt: called after every attempt, in the thread that graded; ``None`` for no call.
        cores: CPU cores of the workers of each GPU; ``None`` if the workers may use any.
    """

    def __init__(self, pools: Sequence[WorkerPool]) -> None:
        """Combine pools.

        Args:
            pools: one for each GPU; ``close`` closes them.
        """
        self._pools, self.width = list(pools), sum(pool.width for pool in pools)
        self.on_attempt: OnAttempt | None = None
        self.cores: list[list[int]] | None = None
        self._changed = threading.Condition()
        # The first slot of every GPU, then the second of every GPU: few requests are spread over all GPUs.
        widest = max(pool.width for pool in pools)
        self._idle = [(gpu, k) for k in range(widest) for gpu, pool in enumerate(pools) if k < pool.width]
        self._losses, self._rests_until, self._closed = [0] * len(pools), [0.0] * len(pools), False
        self._lost: deque[tuple[str, bytes, int]] = deque(maxlen=REMEMBERED)

    def grade(self, request: Request, deadline: float) -> Outcome:
        """Grade on the GPU with the slot that has been idle longest; wait until a slot is idle.

        Args:
            request: the submission.
            deadline: seconds from the moment a slot is idle.

        Returns:
            The outcome.

        Raises:
            WorkerLost: the worker died, or the deadline passed.
        """
        gpu, worker = self._take(request)
        begin, lost = time.perf_counter(), False
        try:
            outcome = self._pools[gpu].grade(request, deadline)
            lost = poisons_worker(outcome)
            return outcome
        except WorkerLost:
            lost = time.perf_counter() - begin < SOON * deadline
            raise
        finally:
            self._give(gpu, worker, (request.task, request.source) if lost else None)
            if self.on_attempt is not None:
                self.on_attempt(request, gpu, worker, begin, time.perf_counter())

    def _take(self, request: Request) -> tuple[int, int]:
        with self._changed:
            lost_on = {gpu for task, source, gpu in self._lost if (task, source) == (request.task, request.source)}
            chosen = set(range(len(self._pools))) - lost_on or set(range(len(self._pools)))
            while True:
                now = time.monotonic()
                idle = [slot for slot in self._idle if slot[0] in chosen]
                ready = [slot for slot in idle if self._rests_until[slot[0]] <= now]
                if idle and not ready and (self._closed or min(self._rests_until[gpu] for gpu in chosen) > now):
                    # All of these GPUs rest: take the one whose rest ends first.
                    ready = [min(idle, key=lambda slot: self._rests_until[slot[0]])]
                if ready:
                    self._idle.remove(ready[0])
                    return ready[0]
                waits = [self._rests_until[gpu] - now for gpu, _ in idle]
                self._changed.wait(min(waits, default=None))

    def _give(self, gpu: int, worker: int, lost: tuple[str, bytes] | None) -> None:
        with self._changed:
            self._idle.append((gpu, worker))
            now, (first, longest) = time.monotonic(), REST
            if lost is not None:
                self._lost.append((*lost, gpu))
            if lost is None:
                self._losses[gpu], self._rests_until[gpu] = 0, 0.0
            elif self._rests_until[gpu] <= now and not self._closed:  # one cause may lose several workers
                self._losses[gpu] += 1
                self._rests_until[gpu] = now + min(longest, first * 2 ** min(self._losses[gpu] - 1, 10))
            self._changed.notify_all()

    def close(self) -> None:
        """Close the pool of every GPU."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        with contextlib.ExitStack() as stack:  # closes all, even if closing one fails
            for pool in self._pools:
                stack.callback(pool.close)


def gpu_pool(gpus: int, workers: int, grader: str = GRADER, uuids: Sequence[str] = ()) -> GpuPool:
    """Start worker processes that see one GPU each.

    Args:
        gpus: number of GPUs, the first of those that this process sees; 0 for one pool of processes that see no GPU.
        workers: gradings at a time on each GPU.
        grader: ``module:name``, as ``ProcessPool`` takes it.
        uuids: of the GPUs (``uuids_of``), to find the CPU cores near them.

    Returns:
        The pool.

    Raises:
        UsageError: ``CUDA_VISIBLE_DEVICES`` shows fewer GPUs.
    """
    cores = len(os.sched_getaffinity(0))
    threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, cores // (max(gpus, 1) * workers)))
    # The GPUs that this process sees need not begin at number 0.
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [n.strip() for n in visible.split(",") if n.strip()] if visible else [str(k) for k in range(gpus)]
    chosen = names[:gpus] if gpus else [""]
    if len(chosen) < gpus:
        raise UsageError(f"CUDA_VISIBLE_DEVICES={visible!r} shows {len(chosen)} GPUs, {gpus} are asked for")
    near_cores = cpu_affinity.shares(uuids or [""] * gpus) if gpus > 1 else [None] * len(chosen)
    environments = [
        {**environment(name, uuid), "OMP_NUM_THREADS": threads}
        for name, uuid in zip(chosen, uuids or [""] * len(chosen), strict=True)
    ]
    return _pools(environments, near_cores, workers, grader)


def environment(name: str, uuid: str) -> dict[str, str]:
    """Return the environment of workers that see one GPU, and cannot open the others where that can be done.

    Args:
        name: of the GPU for CUDA, "" for no GPU.
        uuid: of the GPU for the driver, "" if it is not known.
    """
    closed = gpu_files.others(uuid) if uuid else []
    # Numbers would no longer be right for a process that cannot open the other GPUs.
    return {"CUDA_VISIBLE_DEVICES": uuid, CLOSED: os.pathsep.join(closed)} if closed else {"CUDA_VISIBLE_DEVICES": name}


def _pools(
    environments: Sequence[Mapping[str, str]], near_cores: Sequence[frozenset[int] | None], workers: int, grader: str
) -> GpuPool:  # fmt: skip
    with contextlib.ExitStack() as stack:
        pools = []
        for env, c in zip(environments, near_cores, strict=True):
            pools.append(ProcessPool(workers, grader, env=env, cores=c))
            stack.callback(pools[-1].close)
        pool = GpuPool(pools)
        stack.pop_all()
    pool.cores = [sorted(c) for c in near_cores if c] or None
    return pool


def pool_on(names: Sequence[int | str], workers: int, grader: str = GRADER) -> tuple[GpuPool, str]:
    """Start worker processes on named GPUs, also on GPUs that this process does not see.

    Args:
        names: of the GPUs, as ``nvidia-smi`` shows them: numbers or UUIDs. ``CUDA_VISIBLE_DEVICES`` of this process does
            not matter.
        workers: gradings at a time on each GPU.
        grader: ``module:name``, as ``ProcessPool`` takes it.

    Returns:
        The pool, and the model of the GPUs.

    Raises:
        UsageError: no such GPU, a GPU twice, or GPUs of different models, whose times do not compare.
    """
    uuids, models = _of_driver(names)
    if not names or len(set(uuids)) < len(names):
        raise UsageError(f"gpus is {list(names)!r}; at least one number or UUID of a GPU, each GPU once")
    if len(set(models)) > 1:
        raise UsageError(f"gpus {list(names)!r} are of different models ({', '.join(sorted(set(models)))}); choose equal ones")
    cores = len(os.sched_getaffinity(0))
    threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, cores // (len(names) * workers)))
    # By UUID: numbers in CUDA_VISIBLE_DEVICES follow CUDA's own order, those of nvidia-smi the order on the bus.
    environments = [{**environment(uuid, uuid), "OMP_NUM_THREADS": threads} for uuid in uuids]
    near_cores = cpu_affinity.shares(uuids) if len(uuids) > 1 else [None]
    return _pools(environments, near_cores, workers, grader), models[0]


def _of_driver(names: Sequence[int | str]) -> tuple[list[str], list[str]]:
    """Ask the driver for UUIDs and models of GPUs."""
    try:
        nvml = importlib.import_module("pynvml")
        nvml.nvmlInit()
    except Exception as e:
        raise UsageError(f"gpus is {list(names)!r}, but no NVIDIA driver answers on this machine ({e}); leave gpus out") from e
    uuids, models = [], []
    for name in names:
        try:
            if isinstance(name, int) or name.isdigit():
                handle = nvml.nvmlDeviceGetHandleByIndex(int(name))
            else:
                handle = nvml.nvmlDeviceGetHandleByUUID(name)
            uuids.append(str(nvml.nvmlDeviceGetUUID(handle)))
            models.append(str(nvml.nvmlDeviceGetName(handle)))
        except nvml.NVMLError as e:
            raise UsageError(f"gpus names GPU {name!r}, which the driver does not find ({e}); see: nvidia-smi -L") from e
    return uuids, models


def uuids_of(gpus: int) -> list[str]:
    """Return the ids of the first GPUs that this process sees.

    Args:
        gpus: number of GPUs; 0 for none.

    Returns:
        An id for each, as the driver names it (``GPU-...`` or ``MIG-...``), or "" where torch does not tell it.

    Raises:
        UsageError: torch finds fewer GPUs, or they are of different models, so that times do not compare.
    """
    if gpus < 0:
        raise UsageError(f"--gpus is {gpus}; 0 or more")
    if not gpus:
        return []
    import torch

    count = torch.cuda.device_count()
    if count < gpus:
        raise UsageError(f"--gpus is {gpus}, torch finds {count} on this machine (of parts of a GPU one at a time)")
    models = {torch.cuda.get_device_name(k) for k in range(gpus)}
    if len(models) > 1:
        raise UsageError(f"--gpus {gpus} are of different models ({', '.join(sorted(models))}); choose with CUDA_VISIBLE_DEVICES")
    return [uuid_of(k) for k in range(gpus)]


def uuid_of(device: int) -> str:
    """Return the id of a GPU by its number for torch, as ``uuids_of`` does."""
    import torch

    uuid = str(getattr(torch.cuda.get_device_properties(device), "uuid", ""))
    return uuid if not uuid or uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
