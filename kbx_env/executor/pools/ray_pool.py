"""A worker pool on a Ray cluster: actors with a warm grader each, one for each core or share of a GPU."""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import kbx_env
from kbx_env.errors import KbxError, UsageError
from kbx_env.executor.pools.process import GRADER, Request, WorkerLost, opened, outcome_of, poisons_worker, reply_of
from kbx_env.executor.pools.ray_session import connect, disconnect, last_line
from kbx_env.executor.worker_count import workers_per_gpu
from kbx_env.outcome import Outcome
from kbx_env.spec import packs

_PING_SECONDS = 5.0
"""Time limit for an answer of an idle actor."""
_FAILURES = 3
"""After so many actors in a row that fail to start, a request without a living actor is given up at once."""


class _Actor:
    """Grades in a Ray worker. Takes bytes and JSON, returns bytes: nothing of a submission is pickled."""

    def __init__(self, spec: str) -> None:
        module, _, name = spec.partition(":")
        self._grader = getattr(importlib.import_module(module), name)()

    def hello(self) -> bytes:
        """Return the version of kbx_env and the node, as JSON."""
        import ray

        where = f"{ray.util.get_node_ip_address()} (node {ray.get_runtime_context().get_node_id()[:8]})"
        return json.dumps({"kbx_env": kbx_env.__version__, "where": where}).encode()

    def device(self) -> bytes:
        """Return the name of the GPU that torch finds, or ``cpu``."""
        import torch

        return (torch.cuda.get_device_name(0) if torch.cuda.is_available() else "cpu").encode()

    def grade(self, task: str, options: str, source: bytes, places: str) -> bytes:
        """Return ``reply_of`` for a request, as JSON; ``options`` and ``places`` (task packs) are JSON too."""
        reply = opened(json.loads(places)) or reply_of(self._grader, task, source, json.loads(options))
        return json.dumps(reply).encode()


@dataclass(eq=False)
class _Handle:
    """The pool's handle of one actor.

    Attributes:
        actor: of Ray.
        ready: reference to the first reply of ``hello``.
        started: when it was started, in seconds of ``time.monotonic``.
        where: its node, for messages.
        poisoned: whether it must not be used again.
    """

    actor: Any
    ready: Any
    started: float
    where: str = ""
    poisoned: bool = False


def share(sizes: Sequence[tuple[int, int]], workers: int | None = None) -> int:
    """Choose how many actors share a GPU.

    Ray fills one GPU before it turns to the next, so the number is small if ``workers`` is: they must spread over all GPUs.

    Args:
        sizes: cores and GPUs of each node.
        workers: actors in all; ``None`` for as many as fit.

    Returns:
        Actors for each GPU, at least 1 and at most ``worker_count.MAX_PER_GPU``.
    """
    gpu_nodes = [(cpus, gpus) for cpus, gpus in sizes if gpus]
    most = min((workers_per_gpu(cpus, gpus) for cpus, gpus in gpu_nodes), default=1)
    needed = most if workers is None else math.ceil(workers / max(1, sum(gpus for _, gpus in gpu_nodes)))
    return max(1, min(most, needed))


class RayPool:
    """Ray actors with a warm grader each. Lost actors are replaced where there is room.

    Attributes:
        width: gradings that can run at the same time.
        gpus: whether each actor has a share of a GPU.
    """

    def __init__(
        self, address: str = "local", workers: int | None = None, per_gpu: int | None = None, gpus: bool | None = None,
        grader: str = GRADER, patience: float = 60.0,
    ) -> None:  # fmt: skip
        """Connect to a cluster, or start Ray here. Actors start when they are first needed.

        Args:
            address: ``local`` starts Ray, ``auto`` finds one that runs on this machine, ``HOST:PORT`` is a cluster's head.
                An existing connection of this process is used, and left open by ``close``.
            workers: gradings at a time; by default as many as the cluster has room for now. Give more if it will grow.
            per_gpu: actors that share a GPU through its lock (timing takes the lock alone); by default as many as the
                smallest node has cores for, with two cores left to the kernels that are timed, and no more than
                ``workers`` need.
            gpus: give each actor a share of a GPU; by default if any node has one.
            grader: ``module:Class`` of the grader, importable on every node.
            patience: seconds that a request waits for an actor while none is busy, and that an actor may take to start.

        Raises:
            UsageError: Ray is not installed, the address does not answer, or a number is below 1.
        """
        for name, value in (("workers", 1 if workers is None else workers), ("per_gpu", 1 if per_gpu is None else per_gpu)):
            if value < 1:
                raise UsageError(f"{name} is {value}; at least 1")
        self._ray, self._connected_here = connect(address, workers)
        self._grader, self._patience = grader, patience
        self.gpus = any(n["Resources"].get("GPU") for n in self._nodes()) if gpus is None else gpus
        self._per_gpu = per_gpu or share(self._sizes(), workers)
        # Ray rounds to four decimals: six shares of 0.1667 would be more than one GPU. So round down.
        self._needs = {"CPU": 1.0, **({"GPU": 10_000 // self._per_gpu / 10_000} if self.gpus else {})}
        self._remote = self._ray.remote(_Actor).options(
            num_cpus=1, num_gpus=self._needs.get("GPU", 0), max_restarts=0, scheduling_strategy="SPREAD"
        )
        self._free, self._waiting, self._closed = threading.Condition(), 0, False
        self._idle: list[_Handle] = []
        self._starting: list[_Handle] = []
        self._busy: set[_Handle] = set()
        self._failures, self._last_error, self._not_before = 0, "", 0.0
        self.width = workers or max(1, self._capacity())

    def kinds(self) -> list[str]:
        """Return the GPU models in the cluster, as Ray names them (``H200``), sorted."""
        resources = {r for n in self._nodes() for r in n["Resources"] if r.startswith("accelerator_type:")}
        return sorted(r.partition(":")[2] for r in resources)

    def device(self) -> str:
        """Ask a free actor for its device.

        Returns:
            The name of its GPU as torch gives it, or ``cpu``.

        Raises:
            WorkerLost: no actor starts, or the actor is lost.
        """
        with self._actor() as handle:
            return self._get(handle, handle.actor.device.remote(), self._patience).decode()

    def grade(self, request: Request, deadline: float) -> Outcome:
        """Grade in a free actor; wait until one is free.

        Args:
            request: the submission.
            deadline: seconds from the moment an actor is free.

        Returns:
            The outcome.

        Raises:
            WorkerLost: no actor starts, the actor is lost, the deadline passed, or the pool is closed.
            UsageError: the grader refuses the request.
        """
        options = json.dumps(dict(request.options), default=list)
        with self._actor() as handle:
            ref = handle.actor.grade.remote(request.task, options, request.source, json.dumps(packs.roots()))
            outcome = outcome_of(json.loads(self._get(handle, ref, deadline)))
            handle.poisoned = poisons_worker(outcome)
            return outcome

    def close(self) -> None:
        """End all actors, busy ones too, and the connection to Ray if this pool made it."""
        with self._free:
            if self._closed:
                return
            self._closed = True
            for handle in [*self._idle, *self._starting, *self._busy]:
                self._kill(handle)
            self._free.notify_all()
            # A thread that is inside a call of Ray while it shuts down may never come back.
            self._free.wait_for(lambda: not self._busy and not self._waiting, 10)
        if self._connected_here:
            disconnect()

    def _nodes(self) -> list[dict[str, Any]]:
        return [n for n in self._ray.nodes() if n["Alive"]]

    def _sizes(self) -> list[tuple[int, int]]:
        """Return CPUs and GPUs of every node."""
        return [(int(n["Resources"].get("CPU", 0)), int(n["Resources"].get("GPU", 0))) for n in self._nodes()]

    def _capacity(self) -> int:
        """Return how many actors fit on the nodes that are alive, other users of the cluster left out of account."""
        return sum(min(cpus, gpus * self._per_gpu) if self.gpus else cpus for cpus, gpus in self._sizes())

    def _get(self, handle: _Handle, ref: Any, seconds: float) -> bytes:
        try:
            ready = self._ray.wait([ref], timeout=seconds)[0]
            reply = self._ray.get(ref, timeout=_PING_SECONDS) if ready else None
        except Exception as e:  # Ray's errors have no common base: some of them are ValueError or RuntimeError
            raise WorkerLost(f"the actor on {handle.where} is lost: {last_line(e)}") from e
        if not isinstance(reply, bytes):
            raise WorkerLost(f"no verdict within {seconds:g} s from the actor on {handle.where}")
        return reply

    def _kill(self, handle: _Handle) -> None:
        with contextlib.suppress(Exception):  # it is gone already, and so may be the cluster
            self._ray.kill(handle.actor, no_restart=True)

    @contextlib.contextmanager
    def _actor(self) -> Iterator[_Handle]:
        """Lend a living actor for a ``with`` block. Any error but ``UsageError`` in the block ends the actor."""
        while True:
            handle = self._take()
            try:
                # An actor that died while idle must not cost the request an attempt.
                self._get(handle, handle.actor.hello.remote(), _PING_SECONDS)
                break
            except Exception:
                self._give(handle, lost=True)
        lost = True
        try:
            yield handle
            lost = handle.poisoned
        except UsageError:
            lost = False
            raise
        finally:
            self._give(handle, lost)

    def _give(self, handle: _Handle, lost: bool) -> None:
        with self._free:
            self._busy.discard(handle)
            if lost or self._closed:
                self._kill(handle)
            else:
                self._idle.append(handle)
            self._free.notify_all()

    def _take(self) -> _Handle:
        """Return an idle actor; start one where the cluster has room, and wait for it."""
        end = time.monotonic() + self._patience
        with self._free:
            self._waiting += 1
            try:
                while not self._closed:
                    now = time.monotonic()
                    self._check_starting(now)
                    if self._idle:
                        handle = self._idle.pop()
                        self._busy.add(handle)
                        return handle
                    if self._busy:
                        end = now + self._patience  # the deadline of the busy actor bounds the wait
                    elif now >= end or (self._failures >= _FAILURES and not self._starting):
                        self._failures = 0
                        raise WorkerLost(self._shortage())
                    self._start(now)
                    self._free.wait(0.05)
                raise WorkerLost("the worker pool is closed")
            finally:
                self._waiting -= 1
                self._free.notify_all()

    def _start(self, now: float) -> None:
        if now < self._not_before or len(self._starting) >= self._waiting:
            return
        actors = len(self._busy) + len(self._starting)
        # The first actor is requested even without room: an autoscaler sees the request, and a new node can serve it.
        if actors == 0 or actors < min(self.width, self._capacity()):
            actor = self._remote.remote(self._grader)
            self._starting.append(_Handle(actor, actor.hello.remote(), now))

    def _check_starting(self, now: float) -> None:
        """Move actors that have started to the idle ones, and drop actors that failed or took too long."""
        for handle in list(self._starting):
            timed_out = now - handle.started > self._patience
            if not self._ray.wait([handle.ready], timeout=0)[0] and not timed_out:
                continue
            self._starting.remove(handle)
            error = "" if timed_out else self._identify(handle)
            if timed_out or error:
                self._kill(handle)
                self._failures, self._last_error = self._failures + 1, error or self._last_error
                self._not_before = now + min(30.0, 0.25 * 2**self._failures)  # Ray may choose the same node again
            else:
                self._idle.append(handle)
                self._failures, self._last_error = 0, ""

    def _identify(self, handle: _Handle) -> str:
        """Read node and version of a new actor. Return why it cannot be used, or an empty string."""
        try:
            about = json.loads(self._ray.get(handle.ready, timeout=_PING_SECONDS))
        except Exception as e:
            return last_line(e)
        handle.where, remote, local = about["where"], about["kbx_env"], kbx_env.__version__
        return "" if remote == local else f"{handle.where} has kbx_env {remote}, this machine {local}: install the same"

    def _shortage(self) -> str:
        """Return the message of a request that gets no actor."""
        total, left = self._ray.cluster_resources(), self._ray.available_resources()
        need, has, free = (
            " and ".join(f"{r.get(k, 0):g} {k}" for k in self._needs) for r in (self._needs, total, left)
        )
        text = f"no actor to grade in: one needs {need}; the cluster has {has} on {len(self._nodes())} node(s), {free} free"
        return f"{text}. The last one to start failed: {self._last_error}" if self._last_error else text


def open_ray(
    backend: str, address: str | None = None, workers: int | None = None, per_gpu: int | None = None, timing: bool = True
) -> tuple[RayPool, str]:
    """Make the pool of a run.

    Args:
        backend: ``auto`` and ``cuda`` give actors GPUs; ``cpu`` gives them none.
        address: as ``RayPool`` takes it; ``None`` for ``local``.
        workers: gradings at a time, as ``RayPool`` takes it.
        per_gpu: actors that share a GPU, as ``RayPool`` takes it.
        timing: whether kernels are timed; then all GPUs must be of one model.

    Returns:
        The pool, and the device of its actors: the name of their GPU, or ``cpu``.

    Raises:
        UsageError: no Ray, no GPU for ``cuda``, or GPUs of different models whose times would not compare.
    """
    pool = RayPool(address or "local", workers, per_gpu, gpus=False if backend == "cpu" else None)
    try:
        kinds = " and ".join(pool.kinds())
        if not pool.gpus and backend == "cuda":
            raise UsageError("backend 'cuda': no node of the Ray cluster has a GPU; use backend 'cpu' (no timing)")
        if not pool.gpus:
            return pool, "cpu"
        if " and " in kinds and timing:
            raise UsageError(f"the cluster mixes {kinds}, whose times do not compare; use one kind, or switch timing off")
        device = pool.device()
        if device == "cpu":
            raise UsageError("torch finds no GPU in a Ray actor that was given one; use backend 'cpu', or install CUDA there")
        return pool, device
    except KbxError as e:
        pool.close()
        raise UsageError(str(e)) from e
