"""A lane over a Ray cluster: actors with a warm grader each, on every core or share of a GPU, replaced when lost."""

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
from kbx_env.executor.pools.process import GRADER, Request, WorkerLost, answer, spent, verdict
from kbx_env.executor.pools.ray_session import connect, disconnect, last_line
from kbx_env.outcome import Outcome

_PING_SECONDS = 5.0
_MOST = 16
"""Actors that share a GPU by default, however many cores there are: each has some of its memory."""
_SPARE = 2
"""Cores of a node that are left to the kernels that are timed."""
_FAILURES = 3  # actors in a row that fail to start, before a request is given up at once


class _Actor:
    """Runs in a Ray worker. Bytes and JSON in, bytes out: nothing of a submission is pickled."""

    def __init__(self, spec: str) -> None:
        module, _, name = spec.partition(":")
        self._grader = getattr(importlib.import_module(module), name)()

    def hello(self) -> bytes:
        import ray

        where = f"{ray.util.get_node_ip_address()} (node {ray.get_runtime_context().get_node_id()[:8]})"
        return json.dumps({"kbx_env": kbx_env.__version__, "where": where}).encode()

    def device(self) -> bytes:
        import torch

        return (torch.cuda.get_device_name(0) if torch.cuda.is_available() else "cpu").encode()

    def grade(self, task: str, options: str, source: bytes) -> bytes:
        return json.dumps(answer(self._grader, task, source, json.loads(options))).encode()


@dataclass(eq=False)
class _Place:
    """One actor, seen from the lane."""

    actor: Any
    ready: Any
    asked: float
    where: str = ""
    spent: bool = False


def share(sizes: Sequence[tuple[int, int]], workers: int | None = None) -> int:
    """Actors for each GPU of nodes with so many cores and GPUs, at least 1.

    Ray fills one GPU before it turns to the next: a few actors that are wanted must not fit on one.
    """
    has = [(cpus, gpus) for cpus, gpus in sizes if gpus]
    most = min(_MOST, min(((cpus - _SPARE) // gpus for cpus, gpus in has), default=1))
    needed = most if workers is None else math.ceil(workers / max(1, sum(gpus for _, gpus in has)))
    return max(1, min(most, needed))


class RayPool:
    """Ray actors with a warm grader each. One that dies, hangs or loses its node is replaced where there is room."""

    def __init__(
        self, address: str = "local", workers: int | None = None, per_gpu: int | None = None, gpus: bool | None = None,
        grader: str = GRADER, patience: float = 60.0,
    ) -> None:  # fmt: skip
        """Connect, or start Ray here; actors start when they are first needed. A Ray already in use is left running.

        Args:
            address: ``local`` starts Ray, ``auto`` finds one that runs here, ``HOST:PORT`` is a cluster's head.
            workers: gradings at a time; by default what the cluster has room for now. Give more for one that grows.
            per_gpu: actors that share a GPU, by its lease (timing has it alone); by default as many as the cores of the
                smallest node allow, two of them left to the kernels that are timed, and no more than ``workers`` need.
            gpus: give each actor a share of a GPU; by default when any node has one.
            grader: ``module:Class`` of the grader, importable on every node.
            patience: seconds that a request waits for a place while the lane has no living actor.

        Raises:
            UsageError: Ray is not installed, the address does not answer, or a number is below 1.
        """
        for name, value in (("workers", 1 if workers is None else workers), ("per_gpu", 1 if per_gpu is None else per_gpu)):
            if value < 1:
                raise UsageError(f"{name} is {value}; at least 1")
        self._ray, self._mine = connect(address, workers)
        self._grader, self._patience = grader, patience
        self.gpus = any(n["Resources"].get("GPU") for n in self._nodes()) if gpus is None else gpus
        self._per_gpu = per_gpu or share(self._sizes(), workers)
        # Ray keeps four decimals and rounds: six shares of 0.1667 would be more than one GPU.
        self._needs = {"CPU": 1.0, **({"GPU": 10_000 // self._per_gpu / 10_000} if self.gpus else {})}
        self._remote = self._ray.remote(_Actor).options(
            num_cpus=1, num_gpus=self._needs.get("GPU", 0), max_restarts=0, scheduling_strategy="SPREAD"
        )
        self._free, self._waiting, self._closed = threading.Condition(), 0, False
        self._idle: list[_Place] = []
        self._starting: list[_Place] = []
        self._busy: set[_Place] = set()
        self._failures, self._trouble, self._not_before = 0, "", 0.0
        self.width = workers or max(1, self._room())

    def kinds(self) -> list[str]:
        """The kinds of GPU in the cluster, as Ray names them (``H200``), sorted."""
        found = {r for n in self._nodes() for r in n["Resources"] if r.startswith("accelerator_type:")}
        return sorted(r.partition(":")[2] for r in found)

    def device(self) -> str:
        """The name of the GPU that a free actor sees, as torch gives it, or ``cpu``. Raises WorkerLost like ``grade``."""
        with self._place() as place:
            return self._get(place, place.actor.device.remote(), self._patience).decode()

    def grade(self, request: Request, deadline: float) -> Outcome:
        """Grade in a free actor. ``deadline`` begins when it has one."""
        options = json.dumps(dict(request.options), default=list)
        with self._place() as place:
            ref = place.actor.grade.remote(request.task, options, request.source)
            outcome = verdict(json.loads(self._get(place, ref, deadline)))
            place.spent = spent(outcome)
            return outcome

    def close(self) -> None:
        """End every actor, busy ones too, and Ray when this lane started it."""
        with self._free:
            if self._closed:
                return
            self._closed = True
            for place in [*self._idle, *self._starting, *self._busy]:
                self._kill(place)
            self._free.notify_all()
            # A thread that is inside a call of Ray while it shuts down may never come back.
            self._free.wait_for(lambda: not self._busy and not self._waiting, 10)
        if self._mine:
            disconnect()

    def _nodes(self) -> list[dict[str, Any]]:
        return [n for n in self._ray.nodes() if n["Alive"]]

    def _sizes(self) -> list[tuple[int, int]]:
        """Cores and GPUs of every node."""
        return [(int(n["Resources"].get("CPU", 0)), int(n["Resources"].get("GPU", 0))) for n in self._nodes()]

    def _room(self) -> int:
        """Actors that the cluster as it is now has room for, whoever else uses it."""
        return sum(min(cpus, gpus * self._per_gpu) if self.gpus else cpus for cpus, gpus in self._sizes())

    def _get(self, place: _Place, ref: Any, seconds: float) -> bytes:
        try:
            ready = self._ray.wait([ref], timeout=seconds)[0]
            reply = self._ray.get(ref, timeout=_PING_SECONDS) if ready else None
        except Exception as e:  # Ray's errors have no common base: some of them are ValueError or RuntimeError
            raise WorkerLost(f"the actor on {place.where} is lost: {last_line(e)}") from e
        if not isinstance(reply, bytes):
            raise WorkerLost(f"no verdict within {seconds:g} s from the actor on {place.where}")
        return reply

    def _kill(self, place: _Place) -> None:
        with contextlib.suppress(Exception):  # it is gone already, and so may be the cluster
            self._ray.kill(place.actor, no_restart=True)

    @contextlib.contextmanager
    def _place(self) -> Iterator[_Place]:
        """An actor that lives, for the length of a ``with``; what ends in an error ends it, but for a UsageError."""
        while True:
            place = self._take()
            try:
                # One that died while it was idle costs no request an attempt.
                self._get(place, place.actor.hello.remote(), _PING_SECONDS)
                break
            except Exception:
                self._give(place, lost=True)
        lost = True
        try:
            yield place
            lost = place.spent
        except UsageError:
            lost = False
            raise
        finally:
            self._give(place, lost)

    def _give(self, place: _Place, lost: bool) -> None:
        with self._free:
            self._busy.discard(place)
            if lost or self._closed:
                self._kill(place)
            else:
                self._idle.append(place)
            self._free.notify_all()

    def _take(self) -> _Place:
        """An idle actor, or a new one where the cluster has room."""
        end = time.monotonic() + self._patience
        with self._free:
            self._waiting += 1
            try:
                while not self._closed:
                    now = time.monotonic()
                    self._welcome(now)
                    if self._idle:
                        place = self._idle.pop()
                        self._busy.add(place)
                        return place
                    if self._busy:
                        end = now + self._patience  # its deadline bounds the wait
                    elif now >= end or (self._failures >= _FAILURES and not self._starting):
                        self._failures = 0
                        raise WorkerLost(self._lack())
                    self._start(now)
                    self._free.wait(0.05)
                raise WorkerLost("the lane is closed")
            finally:
                self._waiting -= 1
                self._free.notify_all()

    def _start(self, now: float) -> None:
        if now < self._not_before or len(self._starting) >= self._waiting:
            return
        places = len(self._busy) + len(self._starting)
        # One is asked for even where nothing has room: an autoscaler sees it, and a node that joins gets it.
        if places == 0 or places < min(self.width, self._room()):
            actor = self._remote.remote(self._grader)
            self._starting.append(_Place(actor, actor.hello.remote(), now))

    def _welcome(self, now: float) -> None:
        """Put the actors that have started among the idle ones, and drop those that did not."""
        for place in list(self._starting):
            late = now - place.asked > self._patience
            if not self._ray.wait([place.ready], timeout=0)[0] and not late:
                continue
            self._starting.remove(place)
            trouble = "" if late else self._greet(place)
            if late or trouble:
                self._kill(place)
                self._failures, self._trouble = self._failures + 1, trouble or self._trouble
                self._not_before = now + min(30.0, 0.25 * 2**self._failures)  # Ray may choose the same node again
            else:
                self._idle.append(place)
                self._failures, self._trouble = 0, ""

    def _greet(self, place: _Place) -> str:
        """Name the place. Returns what is wrong with it, or an empty string."""
        try:
            about = json.loads(self._ray.get(place.ready, timeout=_PING_SECONDS))
        except Exception as e:
            return last_line(e)
        place.where, theirs, ours = about["where"], about["kbx_env"], kbx_env.__version__
        return "" if theirs == ours else f"{place.where} has kbx_env {theirs}, this machine {ours}: install the same"

    def _lack(self) -> str:
        total, left = self._ray.cluster_resources(), self._ray.available_resources()
        need, has, free = (
            " and ".join(f"{r.get(k, 0):g} {k}" for k in self._needs) for r in (self._needs, total, left)
        )
        text = f"no actor to grade in: one needs {need}; the cluster has {has} on {len(self._nodes())} node(s), {free} free"
        return f"{text}. The last one to start failed: {self._trouble}" if self._trouble else text


def open_ray(
    backend: str, address: str | None = None, workers: int | None = None, per_gpu: int | None = None, timing: bool = True
) -> tuple[RayPool, str]:
    """A lane for a run, and the device of its actors: GPUs where the cluster has them, unless the backend is ``cpu``.

    Raises:
        UsageError: no Ray, no GPU for ``cuda``, or GPUs whose times would not compare.
    """
    lane = RayPool(address or "local", workers, per_gpu, gpus=False if backend == "cpu" else None)
    try:
        kinds = " and ".join(lane.kinds())
        if not lane.gpus and backend == "cuda":
            raise UsageError("backend 'cuda': no node of the Ray cluster has a GPU; use backend 'cpu' (no timing)")
        if not lane.gpus:
            return lane, "cpu"
        if " and " in kinds and timing:
            raise UsageError(f"the cluster mixes {kinds}, whose times do not compare; use one kind, or switch timing off")
        device = lane.device()
        if device == "cpu":
            raise UsageError("torch finds no GPU in a Ray actor that was given one; use backend 'cpu', or install CUDA there")
        return lane, device
    except KbxError as e:
        lane.close()
        raise UsageError(str(e)) from e
