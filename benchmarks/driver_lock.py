"""Measure what NVIDIA's driver, which has one lock for all GPUs of a host, costs the gradings of that host.

    python benchmarks/driver_lock.py contexts OUT.json [--gpus 1 2 4] [--each 1 3] [--seconds 4]
    python benchmarks/driver_lock.py stacks OUT.json --seconds 60

``contexts``: so many processes for each GPU start the driver, make a context, allocate memory and end, one after the other;
once with the device files of all GPUs open and once with those of the others closed. ``stacks``: run beside gradings as root, it
samples what the holders of the GPU locks and their runners do in the kernel. ``hold_steps.py`` counts the requests of gradings.
"""

from __future__ import annotations

import argparse
import collections
import ctypes
import functools
import glob
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT.parent))
from kbx_env.confinement import close_files
from kbx_env.executor.pools.gpu import uuids_of
from kbx_env.executor.pools.gpu_files import others

BLOCK, BLOCKS = 64 << 20, 8
"""Bytes and number of the allocations of a context."""
ASLEEP = ("futex", "do_epoll", "ep_poll", "poll_schedule", "do_sys_poll", "hrtimer_nanosleep", "do_wait", "unix_stream",
          "pipe_read", "anon_pipe_read", "do_select")  # fmt: skip
"""Kernel functions in which a thread waits for another process of ours."""


def _context() -> list[float]:
    """Start the driver, make a context, allocate and free; the milliseconds of each."""
    cuda, context, device, memory = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p(), ctypes.c_int(), ctypes.c_uint64()
    failed, times = 0, [time.perf_counter()]
    failed |= cuda.cuInit(0) or cuda.cuDeviceGet(ctypes.byref(device), 0)
    times.append(time.perf_counter())
    failed |= cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device) or cuda.cuCtxSetCurrent(context)
    times.append(time.perf_counter())
    for _ in range(BLOCKS):
        failed |= cuda.cuMemAlloc_v2(ctypes.byref(memory), ctypes.c_size_t(BLOCK)) or cuda.cuMemFree_v2(memory)
    times.append(time.perf_counter())
    if failed:
        raise RuntimeError("a call of the CUDA driver failed")
    return [1e3 * (b - a) for a, b in zip(times, times[1:], strict=False)]


def _forked(work: Any) -> tuple[int, Any]:
    """Run work in a fork; its process id and the file from which its result can be read."""
    read, write = os.pipe()
    if (pid := os.fork()) == 0:
        try:
            os.write(write, (json.dumps(work()) + "\n").encode())
        finally:
            os._exit(0)
    os.close(write)
    return pid, os.fdopen(read)


def _chain(uuid: str, closed: bool, until: float) -> list[list[float]]:
    """Make one context after the other on a GPU; the milliseconds of each, with those of its end."""
    os.environ |= {"CUDA_VISIBLE_DEVICES": uuid, "CUDA_DEVICE_MAX_CONNECTIONS": "2"}
    if closed and (files := others(uuid)) and not close_files(files):
        raise RuntimeError("this kernel cannot close files")
    rows = []
    while time.time() < until:
        pid, result = _forked(_context)
        row = json.loads(result.read())
        told = time.perf_counter()
        os.waitpid(pid, 0)
        rows.append([*row, 1e3 * (time.perf_counter() - told)])
    return rows


def contexts(gpus: Sequence[int], each: Sequence[int], seconds: float) -> Iterator[dict[str, Any]]:
    """Yield a row for each number of GPUs, number of processes, and open or closed files."""
    # In a process of its own: a fork of one that has started the driver cannot use it.
    found = subprocess.run([sys.executable, __file__, "uuids", str(max(gpus))], capture_output=True, text=True, check=True)
    uuids = json.loads(found.stdout)
    for count in gpus:
        for at_once in each:
            for closed in (False, True):
                until = time.time() + seconds
                chains = [_forked(functools.partial(_chain, u, closed, until)) for u in uuids[:count] for _ in range(at_once)]
                rows = [row for _, result in chains for row in json.loads(result.read())]
                for pid, _ in chains:
                    os.waitpid(pid, 0)
                steps = [round(statistics.mean(column), 1) for column in zip(*rows, strict=True)]
                yield {"gpus": count, "each": at_once, "closed": closed, "contexts_per_second": len(rows) / seconds,
                       **dict(zip(("driver_ms", "context_ms", "memory_ms", "end_ms"), steps, strict=True))}  # fmt: skip


def _stack(process: int, thread: int) -> str | None:
    """What a thread does: ``runs``, ``sleeps``, or the innermost functions in the kernel; ``None`` where it has ended."""
    try:
        state = Path(f"/proc/{process}/task/{thread}/stat").read_text().rpartition(")")[2].split()[0]
        lines = Path(f"/proc/{process}/task/{thread}/stack").read_text().splitlines()
    except OSError:
        return None
    names = [line.split("] ", 1)[-1].split("+")[0] for line in lines]
    if any(n.startswith(ASLEEP) for n in names[:6]):
        return "sleeps"
    return " < ".join(names[:7]) or ("runs" if state == "R" else "waits")


def stacks(seconds: float) -> dict[str, Any]:
    """Sample every 20 ms the processes that hold a GPU's lock (``use``, exclusively) or its starting lock (``start``)."""
    seen: dict[str, collections.Counter[str]] = {
        f"{lock}: {side}": collections.Counter() for lock in ("use", "start") for side in ("grader", "runner")
    }
    until, forks, listed = time.time() + seconds, collections.defaultdict[int, list[int]](list), 0.0
    while (began := time.time()) < until:
        if began > listed + 1:
            forks.clear()
            for stat in glob.glob("/proc/[0-9]*/stat"):
                try:
                    forks[int(Path(stat).read_text().rpartition(")")[2].split()[1])].append(int(stat.split("/")[2]))
                except OSError:
                    continue
            listed = began
        files = {os.stat(f).st_ino: Path(f).stem for f in glob.glob(f"{tempfile.gettempdir()}/kbx-gpu-*/*.lock")}
        for line in Path("/proc/locks").read_text().splitlines():
            words = line.split()
            lock = files.get(int(words[-3].split(":")[-1]), "") if "->" not in words and "WRITE" in words else ""
            if f"{lock}: grader" not in seen:
                continue
            holder = int(words[-4])
            runners = [r for zygote in forks[holder] for r in [*forks[zygote], *(x for f in forks[zygote] for x in forks[f])]]
            threads = [int(t) for t in os.listdir(f"/proc/{holder}/task")] if os.path.isdir(f"/proc/{holder}/task") else []
            for side, process, thread in [("grader", holder, t) for t in threads] + [("runner", r, r) for r in runners]:
                if (what := _stack(process, thread)) is not None and what != "sleeps":
                    seen[f"{lock}: {side}"][what] += 1
        time.sleep(max(0.0, 0.02 - (time.time() - began)))
    return {side: {"samples": sum(c.values()), "in_the_lock": sum(n for s, n in c.items() if "rmapiLockAcquire" in s),
                   "stacks": c.most_common(40)} for side, c in seen.items()}  # fmt: skip


def main() -> int:
    """Measure one of the two."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = p.add_subparsers(dest="kind", required=True)
    c, s = (kinds.add_parser(name) for name in ("contexts", "stacks"))
    for one in (c, s):
        one.add_argument("out", type=Path)
    c.add_argument("--gpus", type=int, nargs="+", default=[1])
    c.add_argument("--each", type=int, nargs="+", default=[1, 3])
    c.add_argument("--seconds", type=float, default=4.0)
    s.add_argument("--seconds", type=float, required=True)
    kinds.add_parser("uuids").add_argument("gpus", type=int)
    a = p.parse_args()
    if a.kind == "uuids":
        print(json.dumps(uuids_of(a.gpus)))
        return 0
    if a.kind == "stacks":
        a.out.write_text(json.dumps(stacks(a.seconds), indent=1) + "\n")
        return 0
    rows = []
    for row in contexts(a.gpus, a.each, a.seconds):
        rows.append(row)
        print(json.dumps(row), flush=True)
        a.out.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
