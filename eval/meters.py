"""Measures a run of gradings: seconds of each stage, shares of the workers' time, samples of the GPUs."""

from __future__ import annotations

import contextlib
import importlib
import os
import subprocess
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from kbx_env.outcome import Outcome, Stage

STAGES = ("screen", "proof", "compile", "correct", "evidence", "time", "estimate")
"""Stages, in the order in which a grading begins them."""
ON_CPU_TIER = "executed on the CPU tier: "
"""How the message of a CUDA grading that ended in its proof begins."""
DEVICE = (Stage.CORRECT, Stage.EVIDENCE, Stage.TIME)
"""Stages in which the device works for the submission; on the CPU backend, the CPU tier is the device."""

GPU = ("waited", "shared", "alone")
"""Keys besides the stages: seconds of waiting for the GPU, of using it next to others, and alone. Stages contain no waits."""

Sample = tuple[float | None, float | None]
"""GPU utilisation (0 to 1) and memory in use (MB)."""


def stage_seconds(outcome: Outcome) -> dict[str, float]:
    """Return the seconds of each stage and their ``total``; the stages never sum to more than the total.

    A grading that ended in its proof on the CPU tier also carries the stages of the proof. They are left out, because
    ``proof`` is the time of all of them.

    Args:
        outcome: the grading.

    Returns:
        Stage -> seconds.
    """
    seconds = {k: float(v) for k, v in outcome.seconds.items()}
    if "proof" in seconds and outcome.message.startswith(ON_CPU_TIER):
        return {k: v for k, v in seconds.items() if k in ("screen", "proof", "total")}
    return seconds


def spread(values: Sequence[float]) -> dict[str, float | None]:
    """Return number, sum, mean, median and 95 % quantile of values; the last three ``None`` for no value."""
    if not values:
        return {"n": 0, "sum": 0.0, "mean": None, "p50": None, "p95": None}
    x = np.asarray(values, dtype=float)
    return {
        "n": len(values), "sum": float(x.sum()), "mean": float(x.mean()), "p50": float(np.quantile(x, 0.5)),
        "p95": float(np.quantile(x, 0.95)),
    }  # fmt: skip


def by_stage(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float | None]]:
    """Return `spread` of every stage that occurs, over the requests that reached it."""
    found = {s: [r["seconds"][s] for r in rows if s in r["seconds"]] for s in (*STAGES, *GPU, "total")}
    return {s: spread(v) for s, v in found.items() if v}


def shares(rows: Sequence[Mapping[str, Any]], wall: float, workers: int) -> dict[str, float | None]:
    """Return how the workers' time (``wall`` x ``workers``) was spent.

    Args:
        rows: requests.
        wall: seconds of the run.
        workers: in all.

    Returns:
        Shares of 1, ``None`` without a run. ``overhead`` is the part that is neither compilation (``compile``) nor
        ``device`` (correct, evidence and time). It consists of ``screen``, ``proof``, ``estimate``, ``waited`` (for the
        GPU), ``grader`` (inside the grader, in no stage), ``between`` (held by a worker, outside its grader: the way
        there and back, lost attempts, new processes) and ``idle`` (held by no worker: the queue was empty, or the
        parent was busy).
    """
    kinds = ("compile", "device", "screen", "proof", "estimate", "waited", "grader", "between")
    if wall <= 0 or workers < 1:
        return dict.fromkeys(("overhead", *kinds, "idle"))
    spent = dict.fromkeys(kinds, 0.0)
    for r in rows:
        seconds = r["seconds"]
        held, total = r["end"] - r["begin"], seconds.get("total", 0.0)
        for stage in STAGES:
            spent["device" if stage in DEVICE else stage] += seconds.get(stage, 0.0)
        spent["waited"] += seconds.get("waited", 0.0)
        spent["grader"] += max(total - sum(seconds.get(s, 0.0) for s in (*STAGES, "waited")), 0.0)
        spent["between"] += max(held - total, 0.0)
    available = wall * workers
    parts: dict[str, float | None] = {k: v / available for k, v in spent.items()}
    idle = 1 - sum(spent.values()) / available
    return {"overhead": 1 - (spent["compile"] + spent["device"]) / available, **parts, "idle": idle}


def summary(rows: Sequence[Mapping[str, Any]], wall: float, workers: int) -> dict[str, Any]:
    """Return rates, latencies, stages and shares of a run. Infrastructure faults are not counted as kernels.

    Args:
        rows: requests.
        wall: seconds of the run.
        workers: in all.

    Returns:
        The numbers as plain JSON types; ``None`` for what is not known.
    """
    judged = [r for r in rows if r["verdict"] != "infra_fault"]
    rate = len(judged) / wall if wall > 0 else None
    gpus = sorted({r["gpu"] for r in rows if r["gpu"] is not None})
    return {
        "wall_seconds": wall, "kernels": len(judged), "kernels_per_second": rate,
        "per_gpu": [sum(r["gpu"] == g for r in judged) / wall for g in gpus] if rate is not None and gpus else None,
        "verdicts": dict(Counter(str(r["verdict"]) for r in rows).most_common()),
        "stages": by_stage(rows),
        "latency": {
            "from_submission": spread([r["end"] - r["submitted"] for r in rows]),
            "from_begin": spread([r["end"] - r["begin"] for r in rows]),
        },
        "shares": shares(rows, wall, workers),
    }  # fmt: skip


def beside(first: Mapping[str, Any], other: Mapping[str, Any]) -> float | None:
    """Return how many times as many kernels one run judged as another, until the shorter of both ended.

    Args:
        first: a result of `summary` with its requests.
        other: another one.

    Returns:
        Kernels of ``other`` over kernels of ``first``; ``None`` if one had none.
    """
    until = min(r.get("wall_seconds") or 0.0 for r in (first, other))
    a, b = (sum(x["end"] <= until and x["verdict"] != "infra_fault" for x in r["requests"]) for r in (first, other))
    return b / a if a and b else None


def core_seconds(stat: Path = Path("/proc/stat")) -> float | None:
    """Return the seconds that this process' cores have been busy since the machine started; ``None`` if not known."""
    with contextlib.suppress(OSError, ValueError):
        own = {f"cpu{k}" for k in os.sched_getaffinity(0)}
        rows = [line.split() for line in stat.read_text().splitlines()]
        # user, nice, system, then idle and waiting for a disk, then interrupts
        ticks = [sum(map(int, [*r[1:4], *r[6:8]])) for r in rows if r and r[0] in own]
        return sum(ticks) / os.sysconf("SC_CLK_TCK") if ticks else None
    return None


class GpuWatch:
    """Samples GPUs in a thread, through NVML if ``pynvml`` is installed, else through ``nvidia-smi``."""

    def __init__(
        self, uuids: Sequence[str], period: float = 0.5, read: Callable[[], list[Sample]] | None = None
    ) -> None:
        """Make a watch.

        Args:
            uuids: ids of the GPUs.
            period: seconds between samples.
            read: replaces the driver in tests.
        """
        self._uuids, self._period = list(uuids), period
        self._read = read or _reader(self._uuids)
        self._seen: list[list[Sample]] = []
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def now(self) -> list[Sample]:
        """Return one sample of every GPU."""
        return self._read()

    def start(self) -> None:
        """Begin to sample; without a GPU do nothing."""
        if self._uuids:
            self._thread = threading.Thread(target=self._watch, daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """End sampling."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(30)

    def busy(self) -> list[float | None]:
        """Return the mean utilisation of each GPU while sampled: the share of time in which a kernel of any process ran."""
        found: list[float | None] = []
        for k in range(len(self._uuids)):
            known = [u for sample in self._seen if (u := sample[k][0]) is not None]
            found.append(sum(known) / len(known) if known else None)
        return found

    def _watch(self) -> None:
        while not self._stop.wait(self._period):
            self._seen.append(self._read())


def _reader(uuids: list[str]) -> Callable[[], list[Sample]]:
    with contextlib.suppress(Exception):  # not installed, no library of the driver's, no rights
        nvml = importlib.import_module("pynvml")
        nvml.nvmlInit()
        handles = [nvml.nvmlDeviceGetHandleByUUID(u) for u in uuids]
        return lambda: [_from_nvml(nvml, h) for h in handles]
    return lambda: _from_tool(uuids)


def _from_nvml(nvml: Any, handle: Any) -> Sample:
    share = used = None
    with contextlib.suppress(Exception):
        share = nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100
    with contextlib.suppress(Exception):
        used = nvml.nvmlDeviceGetMemoryInfo(handle).used / 1e6
    return share, used


def _from_tool(uuids: list[str]) -> list[Sample]:
    command = ["nvidia-smi", "--query-gpu=uuid,utilization.gpu,memory.used", "--format=csv,noheader,nounits"]
    try:
        text = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return [(None, None)] * len(uuids)
    return parsed(text, uuids)


def parsed(text: str, uuids: Sequence[str]) -> list[Sample]:
    """Parse the output of ``nvidia-smi`` (uuid, percent, MiB).

    Args:
        text: the output.
        uuids: ids of the GPUs.

    Returns:
        A sample of each GPU, ``None`` for numbers that are missing.
    """
    rows = {c[0]: c for line in text.splitlines() if len(c := [x.strip() for x in line.split(",")]) == 3}

    def number(uuid: str, column: int, scale: float) -> float | None:
        try:
            return float(rows[uuid][column]) * scale
        except (KeyError, ValueError):
            return None

    return [(number(u, 1, 0.01), number(u, 2, 1.048576)) for u in uuids]


def shown(value: Any, form: str = ".3g") -> str:
    """Format a number.

    Args:
        value: the number.
        form: its format.

    Returns:
        The text, 'unknown' for ``None``.
    """
    return "unknown" if value is None else format(value, form)


def tell(result: Mapping[str, Any], console: Console) -> None:
    """Print a run: rates, then a line for each stage.

    Args:
        result: of `summary`.
        console: where.
    """
    r, memory = result, result["memory"]
    where = f"{r['gpus']} x {r['device']}" if r["gpus"] else f"CPU backend, {r['cores']} cores"
    left = f"; {n} rows left out" if (n := r["workload"]["left_out"]) else ""
    facts = {
        "device": f"{where}, {r['workers']} workers {'a GPU' if r['gpus'] else ''}".rstrip(),
        "workload": ", ".join(f"{n} {k}" for k, n in r["workload"]["kinds"].items()) + left,
        "ended": f"{len(r['requests'])} of {r['asked']} in {r['wall_seconds']:.1f} s"
                 + (" (interrupted)" if r["interrupted"] else ""),
        "kernels per second": shown(r["kernels_per_second"])
                              + (f" (each GPU: {', '.join(map(shown, r['per_gpu']))})" if r["per_gpu"] else ""),
        "latency p50, p95": "; ".join(
            f"{shown(v['p50'])}, {shown(v['p95'])} s {k.replace('_', ' ')}" for k, v in r["latency"].items()
        ),
        "verdicts": ", ".join(f"{n} {v}" for v, n in r["verdicts"].items()),
        "GPU busy share": ", ".join(map(shown, r["gpu_busy"])) if r["gpu_busy"] else "unknown (no GPU)",
        "overhead share": shown(r["shares"]["overhead"]),
        "workers' time": ", ".join(f"{k} {v:.3f}" for k, v in r["shares"].items() if k != "overhead" and v is not None),
        "cores busy": f"{shown(r.get('cores_busy'))} of {r['cores']}",
        "CPU seconds a kernel": ", ".join(
            f"{role} {s / r['kernels']:.2f}" for role, s in r.get("cpu_seconds", {}).items() if r["kernels"]
        ) or "unknown",
        "of it in the system": ", ".join(
            f"{role} {s / r['kernels']:.2f}" for role, s in r.get("cpu_system_seconds", {}).items() if r["kernels"]
        ) or "unknown",
        "page faults a kernel": ", ".join(
            f"{role} {n / r['kernels']:,.0f}" for role, n in r.get("page_faults", {}).items() if r["kernels"]
        ) or "unknown",
        "dispatch": f"{shown(r['dispatch_ms'])} ms of the parent's CPU for a request",
    }  # fmt: skip
    for when, m in memory.items():
        if m:
            on_gpu = ", ".join(shown(x, ".0f") for x in m["gpu_mb"]) if m["gpu_mb"] else "unknown"
            facts[f"memory at the {when}"] = f"host {m['host_mb']:.0f} MB, GPU {on_gpu}" + (
                " MB" if m["gpu_mb"] else ""
            )
    grid = Table(show_header=False, box=None)
    for name, value in facts.items():
        grid.add_row(name, value)
    console.print(grid)
    table = Table("stage", *(["requests", "sum s", "mean s", "p50 s", "p95 s"]))
    for name, v in r["stages"].items():
        table.add_row(name, str(v["n"]), *(shown(v[k], ".3f") for k in ("sum", "mean", "p50", "p95")))
    console.print(table)
