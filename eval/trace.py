"""Draws a run of gradings: a line for each worker, with the stages of its gradings over time."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kbx_env.eval import meters
from kbx_env.eval import plot_style as style

from kbx_env.errors import UsageError

_COLOURS = {
    "screen": "#9e9ac8", "proof": "#fdae6b", "compile": "#e6550d", "correct": "#31a354", "evidence": "#a1d99b",
    "time": "#3182bd", "estimate": "#9ecae1", "other": "#bdbdbd",
}  # fmt: skip


def pieces(row: Mapping[str, Any]) -> list[tuple[str, float, float]]:
    """Return the stages of one request, one after the other from its begin, in the stages' order.

    A stage that a grading enters twice is drawn once, with both parts. Time in no stage comes last, as ``other``.

    Args:
        row: of ``requests`` in a result of ``eval/throughput.py``.

    Returns:
        (stage, begin, length), in seconds.
    """
    at, found = float(row["begin"]), []
    for stage in meters.STAGES:
        length = float(row["seconds"].get(stage, 0.0))
        if length:
            found.append((stage, at, length))
            at += length
    if row["end"] > at:
        found.append(("other", at, row["end"] - at))
    return found


def draw(result: Mapping[str, Any], file: Path) -> None:
    """Draw a run: a line for each worker, with its requests' stages over time.

    Args:
        result: of ``eval/throughput.py``.
        file: the picture.

    Raises:
        UsageError: matplotlib is not installed, or the file cannot be written.
    """
    check()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    workers = sorted({(r["gpu"], r["worker"]) for r in result["requests"]}, key=lambda x: (x[0] or 0, x[1]))
    height = min(max(1.6 + 0.45 * len(workers), 2.6), 40)
    figure = Figure(figsize=(14, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    seen = set()
    for y, worker in enumerate(workers):
        for row in (r for r in result["requests"] if (r["gpu"], r["worker"]) == worker):
            for stage, begin, length in pieces(row):
                seen.add(stage)
                axes.broken_barh([(begin, length)], (y - 0.36, 0.72), facecolors=_COLOURS[stage], linewidth=0)
            # The frame shows where one request ends and the next begins.
            axes.broken_barh([(row["begin"], row["end"] - row["begin"])], (y - 0.36, 0.72), facecolors="none",
                             edgecolors="black", linewidth=0.4)  # fmt: skip
    axes.set_yticks(range(len(workers)), [f"worker {w}" if g is None else f"GPU {g}, worker {w}" for g, w in workers])
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


def check() -> None:
    """Check before a long run that its picture can be drawn.

    Raises:
        UsageError: matplotlib is not installed.
    """
    style.check("--trace needs")
