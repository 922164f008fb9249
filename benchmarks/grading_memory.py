"""Measure whether memory grows over thousands of gradings, in the requesting process and in its workers.

python benchmarks/grading_memory.py OUT.json [--count 10000] [--workers 2] [--backend cpu|cuda] [--every 250]

Grades experts of eight small tasks in turn, every fourth one broken on purpose, each with a number of its own so that none
repeats, with an executor and a store as in a report. Samples the resident MB of this process and of each worker (not of its
runners, which live for one grading each), and on CUDA also the GPU's memory in use.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import os
import sys
import tempfile
import time
from concurrent.futures import FIRST_COMPLETED, Future, wait
from pathlib import Path
from typing import Any

from rich.progress import track

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from kbx_env import versions
from kbx_env.executor import Executor, ProcessPool, Request
from kbx_env.options import resolve_backend
from kbx_env.outcome import Outcome
from kbx_env.spec.catalog import expert_source, load_task
from kbx_env.store import Store

TASKS = ("math/add", "math/exp_sqrt", "math/softmax", "activation/relu", "activation/gelu_fp16", "activation/leaky_relu",
         "reduce/argmax", "loss/cross_entropy")  # fmt: skip


def source_of(number: int) -> tuple[str, bytes]:
    """Return the task and the source of the grading with a number."""
    task = TASKS[number % len(TASKS)]
    text = expert_source(task)
    assert text is not None
    spoilt = text.replace("tl.store(", "tl.store(1 + ", 1) if number // len(TASKS) % 4 == 3 else text
    return task, f"{spoilt}\n# {number}\n".encode()


def resident(pid: int | str) -> float | None:
    """Return the resident MB of a process; ``None`` if it has ended."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return round(int(line.split()[1]) / 1024, 1)
    return None


def children() -> list[int]:
    """Return the processes that this one has started."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            if int(stat.read_text().rpartition(")")[2].split()[1]) == os.getpid():
                found.append(int(stat.parent.name))
    return found


def sample(done: int, began: float, backend: str) -> dict[str, Any]:
    """Return the current memory use, with the number of gradings ``done`` and the seconds since ``began``."""
    gpu = None
    if backend == "cuda":
        import torch

        free, total = torch.cuda.mem_get_info()
        gpu = round((total - free) / 2**20)
    workers = [r for pid in children() if (r := resident(pid)) is not None and r > 100]
    return {"gradings": done, "seconds": round(time.monotonic() - began, 1), "asking_mb": resident("self"),
            "workers_mb": sorted(workers), "gpu_mb": gpu}  # fmt: skip


def main() -> None:
    """Grade, sample and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--every", type=int, default=250)
    a = parser.parse_args()
    backend = resolve_backend(a.backend)
    about = versions.environment(backend)
    began, samples, verdicts = time.monotonic(), list[dict[str, Any]](), collections.Counter[str]()
    options = {"backend": backend, "targets": (), "timing": False}
    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.closing(Store(Path(folder) / "gradings.sqlite")) as store,
        Executor(ProcessPool(a.workers), store=store, capacity=4 * a.workers) as executor,
    ):
        running: set[Future[Outcome]] = set()
        for number in track(range(a.count), disable=not sys.stderr.isatty()):
            task, source = source_of(number)
            manifest = about | {"fingerprint": load_task(task).fingerprint}
            running.add(executor.submit(Request(task, source, options, manifest, "memory", number)))
            if len(running) > 4 * a.workers:
                ended, running = wait(running, return_when=FIRST_COMPLETED)
                verdicts.update(str(f.result().verdict) for f in ended)
            if number % a.every == 0 and number:
                samples.append(sample(number, began, backend))
                a.out.write_text(json.dumps({"samples": samples}, indent=1) + "\n")
        verdicts.update(str(f.result().verdict) for f in running)
        samples.append(sample(a.count, began, backend))
    result = {"environment": about, "workers": a.workers, "verdicts": dict(verdicts), "samples": samples}
    a.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({"verdicts": dict(verdicts), "first": samples[0], "last": samples[-1]}, indent=1))


if __name__ == "__main__":
    main()
