"""The grading service: what it consists of, how it starts, and how it ends."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
import stat
import sys
import threading
import time
from collections import defaultdict
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import kbx_env
from kbx_env import versions
from kbx_env.envs.prompt import instruction
from kbx_env.errors import UsageError
from kbx_env.executor.pools.gpu import GpuPool, gpu_pool, uuids_of
from kbx_env.executor.pools.process import GRADER, ProcessPool, Request, WorkerPool
from kbx_env.executor.pools.remote import RemotePool
from kbx_env.executor.pools.tiered import TieredPool
from kbx_env.executor.worker_count import default_workers
from kbx_env.options import resolve_backend
from kbx_env.service.connections import Connections
from kbx_env.service.journal import Journal
from kbx_env.service.limits import Limits, make_room
from kbx_env.service.metrics import Metrics
from kbx_env.service.queue import Draining, GradingQueue
from kbx_env.spec.catalog import load_task, load_tasks, splits
from kbx_env.store import Store
from kbx_env.store.checkpoints import Checkpoints

LEAST_TOKEN = 16
"""Fewest characters of a token."""


@dataclass(frozen=True)
class Settings:
    """What ``kbx serve`` is started with."""

    host: str = "127.0.0.1"
    """Address to listen on; beyond loopback a token is needed."""
    port: int = 8300
    """Port to listen on; 0 for any free one."""
    backend: str = "auto"
    """cpu, cuda, or auto: cuda if there is a GPU."""
    gpus: int | None = None
    """GPUs of this machine (CUDA); None: all that this process sees."""
    workers: int | None = None
    """Gradings at a time, on each GPU; None: as many as the cores allow."""
    token_file: str | None = None
    """File with the bearer token."""
    store: str = "runs/serve/gradings.sqlite"
    """File of gradings; the queue is beside it."""
    executor: str = "process"
    """process: worker processes of this machine; ray: a Ray cluster."""
    ray_address: str | None = None
    """Address of the cluster: local, auto, or HOST:PORT."""
    screen: int = 0
    """Workers on this machine that screen on the CPU tier ahead of the GPU; 0 for none."""
    screen_url: str | None = None
    """Another service with the CPU backend that screens."""
    drain: float = 120.0
    """Seconds for which the end waits for gradings that run."""
    limits: Limits = field(default_factory=Limits)
    """What the service accepts."""
    grader: str = GRADER
    """``module:name`` of the workers' grader; another one is for tests and benchmarks."""


class Service:
    """Pools, store, journal and queue behind the HTTP application.

    Attributes:
        settings: as given.
        limits: of the settings, with the connections that fit.
        version: of kbx_env.
        backend: ``cpu`` or ``cuda``.
        environment: device and versions.
        tasks: by id, as ``GET /v1/tasks`` shows them.
        gpus: names of the GPUs.
        queue: of gradings; ``None`` before the start.
        connections: of the server.
        metrics: for Prometheus.
        screening: the two tiers, if there are two.
        gpu_seconds: seconds of work of the workers of each GPU.
        recovered: number of requests that were taken up from an earlier process.
        patient: whether the end waits for gradings that run.
    """

    def __init__(self, settings: Settings, pool: WorkerPool | None = None) -> None:
        """Check the settings, load the tasks, start the workers and open the files.

        Args:
            settings: of the command line.
            pool: replaces the workers, in tests and benchmarks.

        Raises:
            UsageError: a setting is not accepted.
        """
        self.settings, self.version = settings, kbx_env.__version__
        connections = make_room(settings.limits.connections)
        self.limits = Limits(**{**asdict(settings.limits), "connections": connections})
        self.token = read_token(settings)
        self.gpu_seconds: defaultdict[int, float] = defaultdict(float)
        self.screening: TieredPool | None = None
        self.queue: GradingQueue | None = None
        self.connections, self.metrics = Connections(self.limits), Metrics(self)
        self.recovered, self._started, self.patient = 0, time.time(), True
        with contextlib.ExitStack() as stack:
            store = Path(settings.store)
            # The journal first: a second service must not start workers.
            journal = store.with_name(store.name + ".queue")
            self._journal = Journal(journal)
            stack.callback(self._journal.close)
            self._store = stack.enter_context(contextlib.closing(Store(store, checkpoints=False)))
            stack.callback(Checkpoints([journal, store]).close)
            self._pool = self._make_pool(pool)
            self._files = stack.pop_all()
        try:
            self.tasks = {
                t.id: {"task": t.id, "entry": t.entry, "split": splits().get(t.id), "difficulty": t.difficulty,
                       "judge": t.truth.judge.capitalize(), "cases": len(t.cases)}
                for t in load_tasks(split="all")
            }  # fmt: skip
        except BaseException:
            self._pool.close()
            self._files.close()
            raise

    # -- pools -----------------------------------------------------------------------------

    def _make_pool(self, given: WorkerPool | None) -> WorkerPool:
        s = self.settings
        for name, value in (("--workers", s.workers), ("--gpus", s.gpus)):
            if value is not None and value < 1:
                raise UsageError(f"{name} is {value}; at least 1")
        if s.executor not in ("process", "ray"):
            raise UsageError(f"--executor is {s.executor!r}; process or ray")
        self.gpus: list[str] = []
        pool: WorkerPool
        if given is not None:
            self.backend, self.environment = resolve_backend(s.backend), versions.environment("cpu")
            return given
        if s.executor == "ray":
            if s.gpus is not None:
                raise UsageError("--gpus is for --executor process: Ray takes all GPUs of its cluster; leave it out")
            from kbx_env.executor.pools.ray_pool import open_ray

            pool, device = open_ray(s.backend, s.ray_address, s.workers)
            self.backend = "cpu" if device == "cpu" else "cuda"
            self.environment = versions.environment("cpu") | {"device": device}
        else:
            self.backend = resolve_backend(s.backend)
            if s.ray_address is not None:
                raise UsageError("--ray-address is for --executor ray; add that, or leave --ray-address out")
            self.environment = versions.environment(self.backend)
            pool = self._own_pool()
        try:
            return self._tiered(pool)
        except BaseException:
            pool.close()
            raise

    def _own_pool(self) -> WorkerPool:
        s = self.settings
        if self.backend == "cpu":
            if s.gpus is not None:
                raise UsageError("--gpus is for --backend cuda; leave it out")
            return ProcessPool(s.workers or default_workers("cpu"), s.grader)
        import torch

        count = s.gpus or torch.cuda.device_count()
        workers = s.workers or default_workers("cuda", count)
        pool = gpu_pool(count, workers, s.grader, uuids_of(count))
        self.gpus = [torch.cuda.get_device_name(k) for k in range(count)]
        self._watch(pool)
        return pool

    def _watch(self, pool: GpuPool) -> None:
        lock = threading.Lock()

        def on_attempt(request: Request, gpu: int, worker: int, begin: float, end: float) -> None:
            with lock:
                self.gpu_seconds[gpu] += end - begin

        pool.on_attempt = on_attempt

    def _tiered(self, pool: WorkerPool) -> WorkerPool:
        s = self.settings
        if not s.screen and s.screen_url is None:
            return pool
        if self.backend != "cuda":
            raise UsageError("--screen and --screen-url are for --backend cuda: on the CPU backend there is nothing to save")
        if s.screen and s.screen_url is not None:
            raise UsageError("--screen and --screen-url: give one of them")
        screen: WorkerPool
        if s.screen_url is not None:
            screen = RemotePool(s.screen_url, same_code=True)
            if screen.info["backend"] != "cpu":
                screen.close()
                raise UsageError(f"{s.screen_url} grades on {screen.info['backend']}; start it with --backend cpu")
        else:
            screen = ProcessPool(s.screen, s.grader, env={"CUDA_VISIBLE_DEVICES": ""})
        self.screening = TieredPool(screen, pool)
        return self.screening

    # -- start and end ---------------------------------------------------------------------

    async def start(self) -> None:
        """Open the queue, and take up what an earlier process left."""
        self.queue = GradingQueue(self._pool, self._store, self._journal, self.backend, self.environment, self.limits)
        self.queue.on_end = self.metrics.count_outcome
        self.recovered = await self.queue.recover()

    async def stop(self) -> None:
        """Wait for the gradings that run, and close everything."""
        if self.queue is None:
            self._pool.close()
        else:
            left = await self.queue.drain(self.settings.drain, lambda: self.patient)
            await asyncio.to_thread(self.queue.close)
            say(f"ended; {left} requests wait for the next start" if left else "ended")
        await asyncio.to_thread(self._files.close)

    def begin_draining(self) -> None:
        """Answer all that wait, accept nothing more, and begin no further grading."""
        if self.queue is not None:
            self.queue.hold()

    @property
    def open_queue(self) -> GradingQueue:
        """The queue.

        Raises:
            Draining: it is not open yet.
        """
        if self.queue is None:
            raise Draining("the service is starting; try again in a moment")
        return self.queue

    # -- what the application shows --------------------------------------------------------

    def prompt(self, task: str) -> dict[str, Any]:
        """Return a task, with what a model is asked."""
        found = load_task(task)
        return {**self.tasks[task], "prompt": instruction(found, self.backend), "fingerprint": found.fingerprint}

    def about(self) -> dict[str, Any]:
        """Return what the service grades on, and its limits."""
        tiers = (["cpu"] if self.screening is not None else []) + [self.backend]
        return {
            "version": self.version, "backend": self.backend, "environment": self.environment, "workers": self._pool.width,
            "gpus": self.gpus, "tiers": tiers, "limits": asdict(self.limits),
        }  # fmt: skip

    def status(self) -> dict[str, Any]:
        """Return what the live page shows."""
        queue, screening = self.open_queue, self.screening
        return {
            "backend": self.backend, "device": self.environment["device"], "waiting": queue.waiting, "running": queue.running,
            "workers": self._pool.width, "draining": queue.draining.is_set(), "uptime": round(time.time() - self._started, 1),
            "ended": queue.ended, "reused": queue.reused, "rate": round(queue.rate(), 3), "verdicts": dict(queue.verdicts),
            "gpus": [{"name": n, "worker_seconds": round(self.gpu_seconds[k], 1)} for k, n in enumerate(self.gpus)],
            "screened": screening and screening.screened, "survived": screening and screening.survived,
            "recent": list(queue.recent),
        }  # fmt: skip


def read_token(settings: Settings) -> str | None:
    """Return the token, and refuse to listen beyond loopback without one.

    Args:
        settings: of the command line.

    Returns:
        The token; ``None`` for none.

    Raises:
        UsageError: the file cannot be read or holds no good token, or there is none and the address is not loopback.
    """
    how = "python -c 'import secrets; print(secrets.token_urlsafe(32))' > FILE; chmod 600 FILE"
    if settings.token_file is None:
        if not _is_loopback(settings.host):
            raise UsageError(f"--host {settings.host} is not loopback, and there is no --token-file; make one: {how}")
        return None
    path = Path(settings.token_file)
    try:
        text = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as e:
        raise UsageError(f"cannot read --token-file {path} ({e}); make one: {how}") from e
    if len(text) < LEAST_TOKEN or not text.isascii() or len(text.split()) != 1:
        raise UsageError(f"--token-file {path}: a token is one ASCII word of at least {LEAST_TOKEN} characters; make one: {how}")
    if path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        say(f"warning: others can read {path}; chmod 600 {path}")
    return text


def _is_loopback(host: str) -> bool:
    """Return whether all addresses of a host are loopback."""
    try:
        found = {info[4][0] for info in socket.getaddrinfo(host or "0.0.0.0", None)}
    except (OSError, UnicodeError) as e:
        raise UsageError(f"--host {host!r} is no address of this machine ({e})") from e
    return all(ipaddress.ip_address(str(a).partition("%")[0]).is_loopback for a in found)


def say(text: str) -> None:
    """Print a line to stderr."""
    print(f"kbx serve: {text}", file=sys.stderr, flush=True)
