"""What other processes do on a GPU that changes measured times, one activity after the other.

    python benchmarks/timing_disturbances.py OUT.json [--seconds 5] [--processes 6] [--only contexts,runners]

One process times calls of about 6, 50 and 360 us with the grader's stopwatch, in blocks of five calls, as a grading does
while it holds the GPU alone. Others meanwhile do one thing again and again: compute on the CPU, start the driver in a new
process, make and end CUDA contexts, start and end runners, allocate, load modules, query the driver, launch small
kernels. A block counts as disturbed if its trimmed mean differs by more than 2 % (10 % for the shortest calls) from the
median of all blocks of this activity. Activities that disturb must take the GPU lock. The result has one row for each
activity and size.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # run as a script
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from kbx_env.grading.timing.ratio import trimmed_mean

SIZES = {"tiny": 1 << 16, "middle": 1 << 24, "large": 1 << 27}
"""Elements of the fp32 tensor whose relu is timed."""
BOUNDS = {"tiny": 0.10, "middle": 0.02, "large": 0.02}
"""Deviation from the median from which on a block counts as disturbed."""
FULL_BYTES = 1 << 30
"""Bytes of one allocation."""


def _none() -> None:
    time.sleep(0.05)


def _cpu() -> None:
    sum(range(1_000_000))


def _child(body: Callable[[], None], killed: bool) -> None:
    pid = os.fork()
    if pid == 0:
        body()
        if killed:
            time.sleep(60)
        os._exit(0)
    if killed:
        time.sleep(0.7)
        os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def _drivers() -> None:
    from kbx_env.sandbox.limits import start_driver

    _child(start_driver, False)


def _context() -> None:
    from kbx_env.sandbox.limits import make_context, start_driver

    start_driver()
    make_context()


def _contexts() -> None:
    _child(_context, False)


def _killed_contexts() -> None:
    _child(_context, True)


def _memory() -> None:
    block = torch.empty(FULL_BYTES, dtype=torch.uint8, device="cuda")
    del block
    torch.cuda.empty_cache()
    time.sleep(0.005)


def _pinned() -> None:
    block = torch.empty(64 << 20, dtype=torch.uint8, pin_memory=True)
    del block
    torch._C._host_emptyCache()


def _modules() -> None:
    import triton

    from kbx_env.sandbox import warm

    source = triton.compiler.ASTSource(warm._nothing, {"x": "*fp32", "n": "i32", "BLOCK": "constexpr"}, {"BLOCK": 256})
    torch.zeros(1, device="cuda")
    compiled = triton.compile(source)
    compiled._init_handles()


def _telemetry() -> None:
    from kbx_env.grading.timing.telemetry import Telemetry

    Telemetry(str(torch.cuda.get_device_properties(0).uuid)).read()


def _small_kernels() -> None:
    torch.zeros(1, device="cuda")
    torch.cuda.synchronize()
    time.sleep(0.005)


_slots: dict[str, Any] = {}


def _runners() -> None:
    from kbx_env.grading.runtime.runner_pool import RunnerSlot
    from kbx_env.grading.runtime.zygote_client import Zygote

    zygote = _slots.setdefault("zygote", None) or Zygote()
    _slots["zygote"] = zygote
    slot = RunnerSlot(zygote, {"device": "cuda", "without": [], "torch_ops": False})
    try:
        slot.runner.ask({"op": "load", "entry": "f"}, [b"def f(): pass\n"], deadline=time.monotonic() + 60)
    finally:
        slot.close()


ACTIVITIES: dict[str, Callable[[], None]] = {
    "none": _none, "cpu": _cpu, "drivers": _drivers, "contexts": _contexts, "killed_contexts": _killed_contexts, "memory": _memory,
    "pinned": _pinned, "modules": _modules, "telemetry": _telemetry, "small_kernels": _small_kernels, "runners": _runners,
}  # fmt: skip


def _background(name: str, ready: Any, stop: Any, count: Any) -> None:
    torch.set_num_threads(1)
    os.environ["TRITON_CACHE_DIR"] = os.path.join(tempfile.gettempdir(), "kbx-disturbances")
    body = ACTIVITIES[name]
    try:
        body()
        ready.release()
        while not stop.is_set():
            body()
            with count.get_lock():
                count.value += 1
    finally:
        if _slots.get("zygote"):
            _slots["zygote"].close()


def victim(seconds: float) -> list[dict[str, Any]]:
    """Time blocks of calls of all sizes in turns.

    Args:
        seconds: in all.

    Returns:
        One row for each size.
    """
    watches, blocks = _watches(), dict[str, list[list[float]]]()
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        for size, watch in watches.items():
            blocks.setdefault(size, []).append([float(u) for u in watch.measure({"order": [0, 1, 2, 0, 1]})["us"]])
    rows = []
    for size, found in blocks.items():
        means = [trimmed_mean(b) for b in found]
        usual = statistics.median(means)
        off = [m / usual - 1 for m in means]
        calls = [u / usual - 1 for b in found for u in b]
        rows.append({
            "size": size, "us": usual, "blocks": len(found), "disturbed_blocks": sum(abs(x) > BOUNDS[size] for x in off),
            "disturbed_calls": sum(abs(x) > BOUNDS[size] for x in calls), "worst_block": max(off), "worst_call": max(calls),
            "lowest_block": min(off),
        })  # fmt: skip
    return rows


def _watches() -> dict[str, Any]:
    if "watches" not in _slots:
        from kbx_env.device.stopwatch import Stopwatch

        _slots["watches"] = {}
        for size, n in SIZES.items():
            watch = Stopwatch("cuda")
            draws = [{"x": torch.randn(n, device="cuda")} for _ in range(3)]
            watch.prepare(lambda s: torch.relu(s["x"]), draws)
            _slots["watches"][size] = watch
    return dict(_slots["watches"])


def main() -> int:
    """Measure all activities; return 2 without a GPU."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("out", type=Path)
    p.add_argument("--seconds", type=float, default=5.0, help="for each activity")
    p.add_argument("--processes", type=int, default=6)
    p.add_argument("--only", default=",".join(ACTIVITIES))
    a = p.parse_args()
    unknown = set(a.only.split(",")) - set(ACTIVITIES)
    if unknown or not torch.cuda.is_available():
        what = f"no such activity: {', '.join(sorted(unknown))}; known: {', '.join(ACTIVITIES)}" if unknown else "no GPU"
        print(f"timing_disturbances: {what}", file=sys.stderr)
        return 2
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "triton", "kbx_env.sandbox.limits", "kbx_env.sandbox.warm"])
    result: dict[str, Any] = {
        "device": torch.cuda.get_device_name(0), "torch": torch.__version__, "date": time.strftime("%Y-%m-%d"),
        "processes": a.processes, "seconds": a.seconds, "rows": [],
    }  # fmt: skip
    _watches()
    for name in a.only.split(","):
        ready, stop, count = context.Semaphore(0), context.Event(), context.Value("l", 0)
        others = [context.Process(target=_background, args=(name, ready, stop, count)) for _ in range(a.processes)]
        for o in others:
            o.start()
        began = [ready.acquire(timeout=60) for _ in others]
        before, start = count.value, time.monotonic()
        rows = victim(a.seconds)
        rate = (count.value - before) / (time.monotonic() - start)
        stop.set()
        for o in others:
            o.join(10)
            if o.is_alive():
                o.kill()
        for row in rows:
            result["rows"].append({"activity": name, "a_second": rate, "began": sum(began), **row})
            shown = {k: round(v, 4) if isinstance(v, float) else v for k, v in result["rows"][-1].items()}
            print(json.dumps(shown), flush=True)
        a.out.write_text(json.dumps(result, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
