"""What a run of gradings is measured with: stage seconds, shares of the workers' time, GPUs sampled, a picture."""

from __future__ import annotations

import contextlib
import importlib
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kbx_env.errors import UsageError
from kbx_env.outcome import Outcome, Stage

STAGES = ("screen", "proof", "compile", "correct", "evidence", "time", "estimate")
"""In the order in which a grading begins them."""
ON_CPU_TIER = "executed on the CPU tier: "
"""Begins the message of a CUDA grading that ended in its proof."""
DEVICE = (Stage.CORRECT, Stage.EVIDENCE, Stage.TIME)
"""Stages in which the device works for the submission; on the CPU backend, the CPU tier is the device."""
_COLOURS = {
    "screen": "#9e9ac8", "proof": "#fdae6b", "compile": "#e6550d", "correct": "#31a354", "evidence": "#a1d99b",
    "time": "#3182bd", "estimate": "#9ecae1", "other": "#bdbdbd",
}  # fmt: skip

Sample = tuple[float | None, float | None]
"""GPU utilisation (0 to 1) and memory in use (MB)."""


def stage_seconds(outcome: Outcome) -> dict[str, float]:
    """Seconds of each stage and ``total``, so that the stages never sum to more than the total.

    A grading that ended in its proof carries the stages of the proof beside the whole: they are left out.
    """
    seconds = {k: float(v) for k, v in outcome.seconds.items()}
    if "proof" in seconds and outcome.message.startswith(ON_CPU_TIER):
        return {k: v for k, v in seconds.items() if k in ("screen", "proof", "total")}
    return seconds


def spread(values: Sequence[float]) -> dict[str, float | None]:
    """Sum, mean, median and 95 % quantile; ``None`` for what no value tells."""
    if not values:
        return {"n": 0, "sum": 0.0, "mean": None, "p50": None, "p95": None}
    x = np.asarray(values, dtype=float)
    return {
        "n": len(values), "sum": float(x.sum()), "mean": float(x.mean()), "p50": float(np.quantile(x, 0.5)),
        "p95": float(np.quantile(x, 0.95)),
    }  # fmt: skip


def by_stage(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float | None]]:
    """``spread`` of every stage that occurs, over the requests that reached it."""
    found = {s: [r["seconds"][s] for r in rows if s in r["seconds"]] for s in (*STAGES, "total")}
    return {s: spread(v) for s, v in found.items() if v}


def shares(rows: Sequence[Mapping[str, Any]], wall: float, workers: int) -> dict[str, float | None]:
    """What the workers' time (``wall`` seconds x ``workers``) went into.

    Returns:
        ``overhead``: the part that is neither compilation (``compile``) nor ``device`` (correct, evidence and time);
        it consists of ``screen``, ``proof``, ``estimate``, ``grader`` (inside the grader, in no stage), ``between`` (in a
        worker's hands, outside its grader: the way there and back, lost attempts, new processes) and ``idle`` (in no
        worker's hands: the queue was empty, or the parent was busy). All are shares of 1; ``None`` without a run.
    """
    kinds = ("compile", "device", "screen", "proof", "estimate", "grader", "between")
    if wall <= 0 or workers < 1:
        return dict.fromkeys(("overhead", *kinds, "idle"))
    spent = dict.fromkeys(kinds, 0.0)
    for r in rows:
        seconds = r["seconds"]
        held, total = r["end"] - r["begin"], seconds.get("total", 0.0)
        for stage in STAGES:
            spent["device" if stage in DEVICE else stage] += seconds.get(stage, 0.0)
        spent["grader"] += max(total - sum(seconds.get(s, 0.0) for s in STAGES), 0.0)
        spent["between"] += max(held - total, 0.0)
    whole = wall * workers
    told: dict[str, float | None] = {k: v / whole for k, v in spent.items()}
    idle = 1 - sum(spent.values()) / whole
    return {"overhead": 1 - (spent["compile"] + spent["device"]) / whole, **told, "idle": idle}


class GpuWatch:
    """Samples GPUs in a thread of its own, through NVML where ``pynvml`` is installed, else through ``nvidia-smi``."""

    def __init__(
        self, uuids: Sequence[str], period: float = 0.5, read: Callable[[], list[Sample]] | None = None
    ) -> None:
        """A watch over the GPUs with these ids; ``read`` stands in for the driver in tests."""
        self._uuids, self._period = list(uuids), period
        self._read = read or _reader(self._uuids)
        self._seen: list[list[Sample]] = []
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def now(self) -> list[Sample]:
        """One look at every GPU."""
        return self._read()

    def start(self) -> None:
        """Begin to sample; nothing where there is no GPU."""
        if self._uuids:
            self._thread = threading.Thread(target=self._watch, daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """End sampling."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(30)

    def busy(self) -> list[float | None]:
        """Mean utilisation of each GPU while sampled: the share of time in which a kernel ran, whoever's."""
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
    """What ``nvidia-smi`` says (uuid, percent, MiB) of each of the GPUs; ``None`` for what it does not."""
    rows = {c[0]: c for line in text.splitlines() if len(c := [x.strip() for x in line.split(",")]) == 3}

    def number(uuid: str, column: int, scale: float) -> float | None:
        try:
            return float(rows[uuid][column]) * scale
        except (KeyError, ValueError):
            return None

    return [(number(u, 1, 0.01), number(u, 2, 1.048576)) for u in uuids]


def pieces(row: Mapping[str, Any]) -> list[tuple[str, float, float]]:
    """Stage, begin and length of what one request did, laid out in the stages' order from its begin.

    A stage that a grading enters twice is drawn once, with both its parts. What is in no stage comes last, as ``other``.
    """
    at, found = float(row["begin"]), []
    for stage in STAGES:
        length = float(row["seconds"].get(stage, 0.0))
        if length:
            found.append((stage, at, length))
            at += length
    if row["end"] > at:
        found.append(("other", at, row["end"] - at))
    return found


def draw(result: Mapping[str, Any], file: Path) -> None:
    """Write the picture of a run: one line for each worker, its requests' stages over time.

    Raises:
        UsageError: matplotlib is not installed, or the file cannot be written.
    """
    check_picture()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    lanes = sorted({(r["gpu"], r["worker"]) for r in result["requests"]}, key=lambda x: (x[0] or 0, x[1]))
    height = min(max(1.6 + 0.45 * len(lanes), 2.6), 40)
    figure = Figure(figsize=(14, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    seen = set()
    for y, lane in enumerate(lanes):
        for row in (r for r in result["requests"] if (r["gpu"], r["worker"]) == lane):
            for stage, begin, length in pieces(row):
                seen.add(stage)
                axes.broken_barh([(begin, length)], (y - 0.36, 0.72), facecolors=_COLOURS[stage], linewidth=0)
            # The frame shows where one request ends and the next begins.
            axes.broken_barh([(row["begin"], row["end"] - row["begin"])], (y - 0.36, 0.72), facecolors="none",
                             edgecolors="black", linewidth=0.4)  # fmt: skip
    axes.set_yticks(range(len(lanes)), [f"worker {w}" if g is None else f"GPU {g}, worker {w}" for g, w in lanes])
    axes.invert_yaxis()
    axes.set_xlim(0, max([r["end"] for r in result["requests"]], default=1.0))
    axes.set_xlabel("seconds")
    rate = result.get("kernels_per_second")
    axes.set_title(f"{len(result['requests'])} requests, {result['device'] or result['backend']}"
                   + (f", {rate:.2f} kernels/s" if rate is not None else ""), loc="left")  # fmt: skip
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    handles = [Patch(color=_COLOURS[s], label=s) for s in _COLOURS if s in seen]
    if handles:
        figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)
    try:
        figure.savefig(file, dpi=110)
    except (OSError, ValueError) as e:
        raise UsageError(f"cannot write the picture {str(file)!r}: {e}; give a writable FILE.png") from e


def check_picture() -> None:
    """Find out before a long run whether its picture can be drawn.

    Raises:
        UsageError: matplotlib is not installed.
    """
    try:
        importlib.import_module("matplotlib")
    except ImportError as e:
        raise UsageError("--trace needs matplotlib, which is not installed: pip install matplotlib") from e
