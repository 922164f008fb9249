"""Measure the points of the cost model on a GPU, and count what their kernels do without one.

Usage:
    python benchmarks/cost_points.py OUT.json [--budget-seconds 400]     on a GPU: timings and compiled kernels
    python benchmarks/cost_points.py OUT.json --extract MEASURED.json    anywhere: adds the facts of every launch
    python benchmarks/cost_points.py OUT.json --facts-only               anywhere: compiles here, no timings

Timings are medians of device microseconds, each after a flush of the L2 cache. An interrupted run keeps its results so far.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import multiprocessing
import os
import random
import signal
import statistics
import sys
import time
import zlib
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from _cost_bank import Buf, Launch, Point, points

TRITON = {"f32": "*fp32", "f16": "*fp16", "bf16": "*bf16", "i8": "*i8", "i32": "*i32"}
RUNS = 7
FLUSH_BYTES = 512 << 20
#: Cycles that the device sleeps while the host enqueues a sequence: about 0.5 ms, longer than the slowest host needs.
SLEEP_CYCLES = 1_000_000


def ordered() -> list[Point]:
    """Return the points in a fixed random order, so that an interrupted run has some of every task."""
    out = points()
    random.Random(0).shuffle(out)
    return out


def pack(text: str | bytes) -> str:
    """Compress for JSON."""
    return base64.b64encode(zlib.compress(text if isinstance(text, bytes) else text.encode(), 9)).decode()


def unpack(data: str) -> bytes:
    """Undo ``pack``."""
    return zlib.decompress(base64.b64decode(data))


class Output:
    """The JSON file: texts of kernels by hash, and one entry per point."""

    def __init__(self, path: Path, device: dict[str, Any]) -> None:
        self.path = path
        self.data: dict[str, Any] = {"device": device, "kernels": {}, "points": [], "skipped": []}

    def kernel(self, compiled: Any) -> str:
        """Keep a compiled kernel and return its key."""
        cubin = compiled.asm["cubin"]
        key = hashlib.sha256(cubin).hexdigest()[:16]
        if key not in self.data["kernels"]:
            try:
                from kbx_env.backends.cost.cubin import resources

                r = resources(cubin)
                held = {"registers": r.registers, "local_bytes": r.local_bytes}
            except Exception:
                # For another cubin format, or without the package on the GPU machine: ask the driver after loading.
                held = {"registers": int(compiled.n_regs), "local_bytes": 4 * int(compiled.n_spills)}
            texts = {"ttir": pack(compiled.asm["ttir"]), "ptx": pack(compiled.asm["ptx"])}
            self.data["kernels"][key] = {**texts, **held, "shared_bytes": compiled.metadata.shared}
        return key

    def write(self) -> None:
        """Write the file atomically."""
        half = self.path.with_suffix(".part")
        half.write_text(json.dumps(self.data))
        os.replace(half, self.path)


# -- on a GPU -----------------------------------------------------------------------------------
def _tensor(b: Buf) -> Any:
    import torch

    kind = getattr(
        torch, {"f32": "float32", "f16": "float16", "bf16": "bfloat16", "i8": "int8", "i32": "int32"}[b.kind]
    )
    if b.fill == "zero":
        return torch.zeros(b.n, dtype=kind, device="cuda")
    if b.fill == "randn":
        return torch.randn(b.n, dtype=kind, device="cuda")
    if b.fill == "unit":
        return torch.rand(b.n, dtype=kind, device="cuda") * 2 - 1
    high = 2 if b.fill == "coin" else int(b.fill.split(":")[1])
    return torch.randint(0, high, (b.n,), dtype=kind, device="cuda")


def _warm(indices: list[int]) -> int:
    """Compile some points into the disk cache; runs in a worker process."""
    import torch

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    kinds = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16, "i8": torch.int8, "i32": torch.int32}
    every, done = ordered(), 0
    for i in indices:
        for one in every[i].launches:
            args = [kinds[a.kind] if isinstance(a, Buf) else a for a in one.args]
            try:
                one.kernel.warmup(*args, grid=one.grid, **one.const, num_warps=one.warps, num_stages=one.stages)
                done += 1
            except Exception:  # the timing process meets the same error and reports it
                continue
    return done


def warm(count: int, jobs: int, seconds: float) -> None:
    """Compile points in parallel.

    Args:
        count: number of points.
        jobs: number of processes.
        seconds: time limit.
    """
    if jobs < 2:
        return
    start = time.monotonic()
    shares = [list(range(count))[k :: jobs * 4] for k in range(jobs * 4)]
    pool = multiprocessing.get_context("spawn").Pool(jobs)
    try:
        made = sum(pool.map_async(_warm, shares, chunksize=1).get(timeout=seconds))
        print(f"compiled {made} launches in {time.monotonic() - start:.0f} s")
    except Exception as e:
        print(f"compiling ahead stopped: {type(e).__name__}: {e}")
    finally:
        pool.terminate()
        pool.join()


def time_point(p: Point, flush: Any, out: Output) -> dict[str, Any]:
    """Time the launches of a point.

    Args:
        p: the point.
        flush: a buffer that is written to flush the L2 cache.
        out: keeps the compiled kernels.

    Returns:
        The point's entry of the JSON file.
    """
    import torch

    bufs: dict[int, Any] = {}
    calls = []
    for one in p.launches:
        args = list(one.args)
        for k, a in enumerate(args):
            if isinstance(a, Buf):
                if id(a) not in bufs:
                    bufs[id(a)] = _tensor(a)
                args[k] = bufs[id(a)]
        calls.append((one, args))

    def run() -> list[Any]:
        return [
            one.kernel[one.grid](*args, **one.const, num_warps=one.warps, num_stages=one.stages) for one, args in calls
        ]

    compiled = run()
    torch.cuda.synchronize()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(RUNS)]
    for first, last in events:
        flush.zero_()
        torch.cuda._sleep(SLEEP_CYCLES)
        first.record()
        run()
        last.record()
    torch.cuda.synchronize()
    us = [a.elapsed_time(b) * 1e3 for a, b in events]
    launches = []
    for k in compiled:
        driver = {"driver_registers": getattr(k, "n_regs", None), "driver_spills": getattr(k, "n_spills", None)}
        launches.append({"kernel": out.kernel(k), **driver})
    return {"name": p.name, "task": p.task, "measured_us": statistics.median(us), "runs_us": us, "launches": launches}


def measure(path: Path, budget: float, jobs: int) -> int:
    """Time every point.

    Args:
        path: the JSON file.
        budget: time limit in seconds.
        jobs: number of processes that compile.

    Returns:
        The exit status.
    """
    import torch
    import triton

    start = time.monotonic()
    every = ordered()
    warm(len(every), jobs, budget * 0.6)
    torch.manual_seed(0)
    props = torch.cuda.get_device_properties(0)
    about = {"name": props.name, "sms": props.multi_processor_count, "torch": torch.__version__}
    about |= {"triton": triton.__version__, "l2_bytes": getattr(props, "L2_cache_size", 0)}
    out = Output(path, about)
    flush = torch.zeros(FLUSH_BYTES // 4, dtype=torch.int32, device="cuda")
    pairs = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(RUNS)]
    for a, b in pairs:
        torch.cuda._sleep(SLEEP_CYCLES)
        a.record()
        b.record()
    torch.cuda.synchronize()
    about["empty_us"] = statistics.median(a.elapsed_time(b) * 1e3 for a, b in pairs)
    try:
        for k, p in enumerate(every):
            if time.monotonic() - start > budget:
                out.data["skipped"] += [[q.name, "budget"] for q in every[k:]]
                break
            try:
                out.data["points"].append(time_point(p, flush, out))
            except Exception as e:
                out.data["skipped"].append([p.name, f"{type(e).__name__}: {str(e)[:200]}"])
                # After a fault of the device nothing can be measured in this process.
                torch.cuda.synchronize()
            if k % 50 == 49:
                out.write()
                print(f"{k + 1} points, {time.monotonic() - start:.0f} s", flush=True)
    finally:
        out.write()
    print(f"{len(out.data['points'])} points, {len(out.data['skipped'])} skipped, {time.monotonic() - start:.0f} s")
    for name, why in out.data["skipped"][:10]:
        print("skipped", name, why)
    return 0


# -- anywhere -----------------------------------------------------------------------------------
def compile_here(one: Launch) -> Any:
    """Compile a launch for sm_90 without a GPU, specialised as the launcher would."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    names = one.kernel.arg_names
    signature: dict[str, str] = {}
    const: dict[Any, Any] = dict(one.const)
    attrs: dict[Any, Any] = {}
    for i, a in enumerate(one.args):
        if isinstance(a, Buf):
            signature[names[i]] = TRITON[a.kind]
        elif isinstance(a, float):
            signature[names[i]] = "fp32"
        elif a == 1:
            signature[names[i]], const[names[i]] = "constexpr", 1
        else:
            signature[names[i]] = "i32"
        if isinstance(a, Buf) or isinstance(a, int) and a % 16 == 0:
            attrs[(i,)] = [["tt.divisibility", 16]]
    signature |= {k: "constexpr" for k in one.const}
    options = {"num_warps": one.warps, "num_stages": one.stages}
    return compile(ASTSource(one.kernel, signature, const, attrs), target=GPUTarget("cuda", 90, 32), options=options)


def _memory(b: Buf, cache: dict[Any, Any]) -> Any:
    import numpy as np

    if b.fill in ("zero", "randn"):
        # Only values that addresses depend on must be real; pages of zeros take no memory until they are written.
        return np.zeros(b.bytes, np.uint8)
    key = (b.kind, b.n, b.fill)
    if key not in cache:
        rng = np.random.default_rng(0)
        if b.fill == "unit":
            cache[key] = (rng.random(b.n, np.float32) * 2 - 1).view(np.uint8)
        else:
            high = 2 if b.fill == "coin" else int(b.fill.split(":")[1])
            cache[key] = rng.integers(0, high, b.n, np.int8 if b.kind == "i8" else np.int32).view(np.uint8)
    return cache[key]


def extract(p: Point, compiled: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the facts of a point's launches.

    Args:
        p: the point.
        compiled: its compiled kernels.

    Returns:
        One object for each launch, as plain JSON types.
    """
    from kbx_env.backends.cost.facts import count, facts
    from kbx_env.backends.ttir import Region

    cache: dict[Any, Any] = {}
    regions: dict[int, Any] = {}
    found = []
    for one, k in zip(p.launches, compiled, strict=True):
        flat: list[int | float] = []
        for a in one.args:
            if isinstance(a, Buf):
                if id(a) not in regions:
                    regions[id(a)] = Region((len(regions) + 1) << 36, _memory(a, cache), f"arg{len(regions)}")
                flat.append(regions[id(a)].base)
            elif isinstance(a, float) or a != 1:
                # Triton compiles the integer 1 in, so that it is no argument.
                flat.append(a)
        deadline = time.process_time() + 30
        counts = count(
            unpack(k["ttir"]).decode(), one.grid, flat, list(regions.values()), num_stages=one.stages, deadline=deadline
        )
        x, y, z = one.grid
        f = facts(
            counts, kernel=one.kernel.__name__.lstrip("_"), programs=x * y * z, num_warps=one.warps,
            num_stages=one.stages, registers=k["registers"], shared_bytes=k["shared_bytes"],
            local_bytes=k["local_bytes"],
        )  # fmt: skip
        found.append(f.to_dict())
    return found


def _extract_some(names: list[str], entries: list[list[dict[str, Any]]]) -> list[Any]:
    every = {p.name: p for p in points()}
    out: list[Any] = []
    for name, compiled in zip(names, entries, strict=True):
        try:
            out.append(extract(every[name], compiled))
        except Exception as e:
            out.append(f"{type(e).__name__}: {str(e)[:300]}")
    return out


def add_facts(data: dict[str, Any], jobs: int) -> None:
    """Add the facts of every point.

    Args:
        data: the content of the JSON file, which is changed.
        jobs: number of processes.
    """
    start = time.monotonic()
    entries = data["points"]
    work = [([e["name"]], [[data["kernels"][k["kernel"]] for k in e["launches"]]]) for e in entries]
    if jobs > 1:
        with multiprocessing.get_context("spawn").Pool(jobs) as pool:
            results = pool.starmap(_extract_some, work, chunksize=8)
    else:
        results = [_extract_some(*w) for w in work]
    bad = 0
    for e, (r,) in zip(entries, results, strict=True):
        if isinstance(r, str):
            bad += 1
            e["failed"] = r
            print("no facts:", e["name"], r)
        else:
            e["facts"] = r
    print(f"facts of {len(entries) - bad} points, {bad} failed, {time.monotonic() - start:.0f} s")


def facts_only(path: Path, only: str, jobs: int) -> int:
    """Compile and extract without a GPU, to try the extraction.

    Args:
        path: the JSON file.
        only: text in the names of the points.
        jobs: number of processes.

    Returns:
        The exit status.
    """
    out = Output(path, {"name": "none"})
    start = time.monotonic()
    for p in ordered():
        if only in p.name:
            try:
                made = [compile_here(one) for one in p.launches]
            except Exception as e:
                out.data["skipped"].append([p.name, f"{type(e).__name__}: {str(e)[:200]}"])
                print("skipped", *out.data["skipped"][-1])
                continue
            keys = [out.kernel(k) for k in made]
            out.data["points"].append({"name": p.name, "task": p.task, "launches": [{"kernel": k} for k in keys]})
    print(f"compiled {len(out.data['points'])} points in {time.monotonic() - start:.0f} s")
    add_facts(out.data, jobs)
    out.write()
    return 0


def main() -> int:
    """Run the command."""
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("out", type=Path)
    ap.add_argument("--budget-seconds", type=float, default=400)
    ap.add_argument("--extract", type=Path, help="a file that a GPU run wrote")
    ap.add_argument("--facts-only", action="store_true")
    ap.add_argument("--only", default="", help="with --facts-only: points whose name contains this")
    ap.add_argument("--jobs", type=int, default=min(14, os.cpu_count() or 1))
    a = ap.parse_args()
    if a.extract:
        out = Output(a.out, {})
        out.data = json.loads(a.extract.read_text())
        add_facts(out.data, a.jobs)
        out.write()
        return 0
    if a.facts_only:
        return facts_only(a.out, a.only, a.jobs)
    # Written before the command may be killed.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    return measure(a.out, a.budget_seconds, a.jobs)


if __name__ == "__main__":
    sys.exit(main())
