"""What a CUDA context costs: seconds to make and to end one, alone and many at a time, and what waits meanwhile.

    python benchmarks/context_costs.py OUT.json [--repeats 4]

Every graded submission has a process and a CUDA context of its own. Each row is one way to make contexts: a setting of the
driver's environment, a parent process that is bare or has torch loaded, and so many processes at once. Each process reports
the seconds of its steps (``init``, ``context``, ``first`` allocation and kernel), and its parent those of its end. Beside
them, one process that has a context allocates and frees a block of memory: its median and longest seconds show how long
others wait for the driver.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import multiprocessing
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

SETTINGS: dict[str, dict[str, str]] = {
    "default": {},
    "one connection": {"CUDA_DEVICE_MAX_CONNECTIONS": "1"},
    "small queues": {"CUDA_SCALE_LAUNCH_QUEUES": "0.25x"},
    "both": {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "CUDA_SCALE_LAUNCH_QUEUES": "0.25x"},
}
"""Environment variables of the driver."""
BLOCK = 256 << 20
"""Bytes that the waiting process allocates."""


def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")


def _call(status: int) -> None:
    if status:
        raise RuntimeError(f"CUDA error {status}")


def _bare() -> dict[str, float]:
    cuda, context, device, memory = _driver(), ctypes.c_void_p(), ctypes.c_int(), ctypes.c_uint64()
    t0 = time.perf_counter()
    _call(cuda.cuInit(0))
    _call(cuda.cuDeviceGet(ctypes.byref(device), 0))
    t1 = time.perf_counter()
    _call(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device))
    _call(cuda.cuCtxSetCurrent(context))
    t2 = time.perf_counter()
    _call(cuda.cuMemAlloc_v2(ctypes.byref(memory), ctypes.c_size_t(1 << 20)))
    _call(cuda.cuMemsetD8_v2(memory, 0, ctypes.c_size_t(1 << 20)))
    _call(cuda.cuCtxSynchronize())
    return {"init": t1 - t0, "context": t2 - t1, "first": time.perf_counter() - t2}


def _torch() -> dict[str, float]:
    import torch

    found = _bare()
    t0 = time.perf_counter()
    torch.cuda.init()
    torch.zeros(1, device="cuda")
    torch.cuda.synchronize()
    return found | {"torch": time.perf_counter() - t0}


def _fork(body: Any, environment: dict[str, str]) -> tuple[int, int]:
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.environ.update(environment)
        try:
            text = json.dumps(body())
        except BaseException as e:
            text = json.dumps({"error": repr(e)})
        os.write(write, text.encode())
        os.close(write)
        os._exit(0)
    os.close(write)
    return pid, read


def _wave(body: Any, environment: dict[str, str], count: int) -> list[dict[str, float]]:
    began = time.perf_counter()
    made, rows = [_fork(body, environment) for _ in range(count)], []
    for pid, read in made:
        with os.fdopen(read) as f:
            row = json.loads(f.read())
        reported = time.perf_counter()
        os.waitpid(pid, 0)
        rows.append(row | {"end": time.perf_counter() - reported})
    return [r | {"wave": time.perf_counter() - began} for r in rows]


def _parent(pipe: Any) -> None:
    """Serve waves in a process without a context: a context cannot be forked."""
    import torch  # noqa: F401

    bodies = {"bare": _bare, "torch": _torch}
    while (job := pipe.recv()) is not None:
        body, environment, count = job
        pipe.send(_wave(bodies[body], environment, count))


def _waiter(ready: Any, stop: Any, pipe: Any) -> None:
    cuda, memory = _driver(), ctypes.c_uint64()
    _bare()
    ready.set()
    spent: list[float] = []
    while not stop.is_set():
        t = time.perf_counter()
        _call(cuda.cuMemAlloc_v2(ctypes.byref(memory), ctypes.c_size_t(BLOCK)))
        _call(cuda.cuMemFree_v2(memory))
        spent.append(time.perf_counter() - t)
        time.sleep(0.002)
        if pipe.poll():
            pipe.recv()
            pipe.send(spent)
            spent = []


def main() -> int:
    """Measure all rows."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("out", type=Path)
    p.add_argument("--repeats", type=int, default=4)
    a = p.parse_args()
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    parent = context.Process(target=_parent, args=(theirs,))
    parent.start()
    ready, stop = context.Event(), context.Event()
    listen, speak = context.Pipe()
    waiter = context.Process(target=_waiter, args=(ready, stop, speak))
    waiter.start()
    if not ready.wait(60):
        print("context_costs: no GPU", file=sys.stderr)
        waiter.kill()
        parent.kill()
        return 2
    rows = []
    for body, setting, count in [
        *(("bare", s, n) for s in SETTINGS for n in (1, 6)), *(("torch", s, n) for s in ("default", "both") for n in (1, 6, 12)),
    ]:  # fmt: skip
        listen.send(0)
        listen.recv()
        runs: list[dict[str, float]] = []
        for _ in range(a.repeats if count == 1 else 2):
            ours.send((body, SETTINGS[setting], count))
            runs += ours.recv()
        listen.send(0)
        spent = sorted(listen.recv())
        row: dict[str, Any] = {"parent": body, "setting": setting, "at_once": count, "errors": sum("error" in r for r in runs)}
        for step in sorted({k for r in runs for k in r} - {"error"}):
            row[step] = round(statistics.median(r[step] for r in runs if step in r), 4)
        row |= {"wait_median": round(statistics.median(spent), 5), "wait_longest": round(spent[-1], 4), "waits": len(spent)}
        rows.append(row)
        print(json.dumps(row), flush=True)
        a.out.write_text(json.dumps(rows, indent=1))
    ours.send(None)
    stop.set()
    for process in (parent, waiter):
        process.join(10)
    return 0


if __name__ == "__main__":
    sys.exit(main())
