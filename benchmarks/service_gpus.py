"""The grading service over the GPUs of this machine, fed by two clients; one GPU is taken away in the middle.

    python benchmarks/service_gpus.py OUT.json [--gpus 2] [--workers 12] [--count 160] [--lose GPU] [--at S] [--for S]

``kbx serve --backend cuda`` starts with all GPUs. Two client processes send half of the kernels each (experts, untimed, each
source once). ``--lose N`` kills every worker on GPU N from second ``--at`` on, as often as it is started again, for ``--for``
seconds: to the service that is a GPU that fails. The result has the verdicts, the attempts, and the gradings a second before,
during and after the loss. The exit status is 1 if a kernel has no verdict, or another one than ``correct``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if __package__ in (None, ""):
    sys.path.insert(0, str(ROOT))

from kbx_env import versions
from kbx_env.client import Client
from kbx_env.errors import UsageError
from kbx_env.executor.pools.gpu import uuids_of
from kbx_env.spec.catalog import expert_source, task_ids

START_SECONDS = 120.0
"""Seconds that the service may take until it is ready."""
PAUSE_SECONDS = 0.2
"""Seconds between two looks for workers to kill."""


def workers_on(names: Collection[str]) -> list[int]:
    """Return the processes of this user that see only one GPU.

    Args:
        names: its number and its UUID; ``CUDA_VISIBLE_DEVICES`` of a worker is one of them.

    Returns:
        Process ids.
    """
    found = []
    wanted = {f"CUDA_VISIBLE_DEVICES={name}".encode() for name in names}
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and wanted & set((entry / "environ").read_bytes().split(b"\0")):
                found.append(int(entry.name))
    return found


def names_of(gpu: int, gpus: int, backend: str) -> list[str]:
    """Return what ``CUDA_VISIBLE_DEVICES`` of the workers on a GPU can be.

    Args:
        gpu: 0 for the first of those that the service uses.
        gpus: how many it uses.
        backend: ``cpu`` or ``cuda``.

    Returns:
        The GPU's number or name for CUDA, and its UUID.

    Raises:
        UsageError: the service uses no such GPU, or torch does not find it.
    """
    if backend != "cuda" or not 0 <= gpu < gpus:
        raise UsageError(f"--lose takes the number of a GPU, 0 to {gpus - 1}, and needs --backend cuda; it is {gpu}")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(gpus)))
    return [*visible.split(",")[gpu : gpu + 1], uuids_of(gpus)[gpu]]


def lose(names: Collection[str], at: float, seconds: float, killed: list[int]) -> None:
    """Kill all workers of a GPU again and again.

    Args:
        names: of the GPU, as ``workers_on`` takes them.
        at: seconds from now until the first kill.
        seconds: between the first and the last kill.
        killed: receives the process ids.
    """
    time.sleep(at)
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        for pid in workers_on(names):
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
                killed.append(pid)
        time.sleep(PAUSE_SECONDS)


def client(url: str, tasks: Sequence[str], began: float, rows: Any) -> None:
    """Send experts and report each verdict.

    Args:
        url: of the service.
        tasks: whose experts are sent.
        began: ``time.monotonic`` at the start of the measurement.
        rows: queue that receives task, verdict, message, attempt and seconds since the start.
    """
    with Client(url) as service:
        pairs = [(t, expert_source(t) or "") for t in tasks]
        for k, outcome in service.grade_many(pairs, timing=False, targets=()):
            attempt = outcome.manifest.get("attempt", 1)
            rows.put((tasks[k], outcome.verdict.value, outcome.message[:200], attempt, time.monotonic() - began))


def ready(service: Client, process: subprocess.Popen[bytes]) -> None:
    """Wait until the service answers.

    Args:
        service: its client.
        process: the service.

    Raises:
        RuntimeError: it ended, or is not ready in time.
    """
    until = time.monotonic() + START_SECONDS
    while time.monotonic() < until and process.poll() is None:
        with contextlib.suppress(Exception):
            service.health()
            return
        time.sleep(PAUSE_SECONDS)
    raise RuntimeError("the service did not start")


def rates(ends: Sequence[float], at: float, seconds: float) -> dict[str, float | None]:
    """Return gradings a second before, during and after the loss of a GPU.

    Args:
        ends: seconds at which gradings ended.
        at: second of the loss.
        seconds: its length.

    Returns:
        By part; ``None`` for a part without time.
    """
    last = max(ends, default=0.0)
    # Half of the time before is left out: workers start.
    parts = {"before": (at / 2, at), "during": (at, at + seconds), "after": (at + seconds, last)}
    return {
        name: round(sum(lo <= e < hi for e in ends) / (hi - lo), 3) if hi > lo else None for name, (lo, hi) in parts.items()
    }  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; exit status 0 if every kernel is correct."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT.json")
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--workers", type=int, default=12, help="gradings at a time on each GPU")
    parser.add_argument("--count", type=int, default=160, help="kernels in all")
    parser.add_argument("--backend", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--seed", type=int, default=0, help="of the choice of tasks")
    parser.add_argument("--lose", type=int, metavar="GPU", help="the GPU that fails: 0 for the first of those that are used")
    parser.add_argument("--at", type=float, default=40.0, help="second at which it fails")
    parser.add_argument("--for", type=float, default=15.0, dest="lost", help="seconds for which it fails")
    a = parser.parse_args(argv)
    try:
        lost = [] if a.lose is None else names_of(a.lose, a.gpus, a.backend)
    except UsageError as e:
        parser.error(str(e))
    tasks = random.Random(a.seed).sample(task_ids(), min(a.count, len(task_ids())))
    command = [sys.executable, "-m", "kbx_env", "serve", "--port", "8399", "--backend", a.backend, "--workers", str(a.workers)]
    command += ["--gpus", str(a.gpus)] if a.backend == "cuda" else []
    context, rows, killed = multiprocessing.get_context("spawn"), [], list[int]()
    with tempfile.TemporaryDirectory() as folder, Path(folder, "log").open("wb") as log:
        process = subprocess.Popen([*command, "--store", f"{folder}/store.sqlite"], stdout=log, stderr=log)
        try:
            with Client("http://127.0.0.1:8399") as service:
                ready(service, process)
            began, results = time.monotonic(), context.Queue()
            if lost:
                threading.Thread(target=lose, args=(lost, a.at, a.lost, killed), daemon=True).start()
            halves = [tasks[k::2] for k in range(2)]
            clients = [context.Process(target=client, args=("http://127.0.0.1:8399", h, began, results)) for h in halves]
            for one in clients:
                one.start()
            while len(rows) < len(tasks):
                rows.append(results.get(timeout=600))
            for one in clients:
                one.join()
        finally:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(30)
            process.kill()
        told = Path(folder, "log").read_text(errors="replace")[-2000:]
    verdicts = Counter(r[1] for r in rows)
    found = {
        "environment": versions.environment(a.backend), "gpus": a.gpus, "workers": a.workers, "kernels": len(tasks),
        "seconds": round(max(r[4] for r in rows), 1), "verdicts": dict(verdicts), "killed": len(set(killed)),
        "repeated": sum(r[3] > 1 for r in rows), "rates": rates([r[4] for r in rows], a.at, a.lost) if lost else None,
        "not_correct": [r for r in rows if r[1] != "correct"], "rows": rows, "log": told,
    }  # fmt: skip
    a.out.parent.mkdir(parents=True, exist_ok=True)
    a.out.write_text(json.dumps(found, indent=1))
    print({k: v for k, v in found.items() if k not in ("rows", "log", "environment")})
    return 0 if verdicts["correct"] == len(tasks) else 1


if __name__ == "__main__":
    sys.exit(main())
