"""Best-so-far curves of searches: means over tasks, intervals over tasks and seeds, and their picture."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kbx_env.eval import plot_style as style

from kbx_env.errors import UsageError

DRAWS = 400
"""Bootstrap samples behind an interval."""
POINTS = 60
"""Points of a curve over seconds."""
_COLOURS = ("#3182bd", "#e6550d", "#31a354", "#756bb1", "#636363", "#c51b8a")


def best_so_far(gradings: Sequence[Mapping[str, Any]], axis: str, at: float) -> float | None:
    """Return the best value among the gradings up to a point.

    Args:
        gradings: rows with ``value`` (``None``: not correct, or not known), ``number`` (from 1) and ``seconds``.
        axis: ``number`` or ``seconds``.
        at: the point on that axis.

    Returns:
        The largest value; ``None`` if no grading up to there has one.
    """
    values = [g["value"] for g in gradings if g[axis] <= at and g["value"] is not None]
    return max(values, default=None)


def mean_of(runs: Sequence[Mapping[str, Any]], value: Callable[[Mapping[str, Any]], float | None]) -> dict[str, Any]:
    """Return the mean over tasks of the mean over seeds, with its 95 % interval.

    The interval is a nested bootstrap: it draws tasks, then seeds of each drawn task, with replacement. scipy's
    bootstrap draws on one level only.

    Args:
        runs: rows of ``compare.json`` of one policy.
        value: the value of a run, ``None`` if it has none. Such runs are left out and counted, because a mean over few
            runs flatters.

    Returns:
        ``mean``, ``low`` and ``high`` (``None`` for a single run), ``known``, the runs with a value, and ``runs``, all
        of them.
    """
    tasks: dict[str, list[float]] = {}
    for r in runs:
        found = value(r)
        if found is not None:
            tasks.setdefault(r["task"], []).append(found)
    known = sum(map(len, tasks.values()))
    row: dict[str, Any] = {"known": known, "runs": len(runs), "mean": None, "low": None, "high": None}
    if not known:
        return row
    rows = list(tasks.values())
    row["mean"] = _mean([_mean(v) for v in rows])
    if known > 1:
        draw = random.Random(0)
        means = sorted(
            _mean([_mean(draw.choices(v, k=len(v))) for v in draw.choices(rows, k=len(rows))]) for _ in range(DRAWS)
        )
        row["low"], row["high"] = means[int(0.025 * DRAWS)], means[math.ceil(0.975 * DRAWS) - 1]
    return row


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def curve(runs: Sequence[Mapping[str, Any]], axis: str, points: Sequence[float]) -> list[dict[str, Any]]:
    """Return the best-so-far curve of one policy.

    Args:
        runs: rows of ``compare.json`` of the policy.
        axis: ``number`` or ``seconds``.
        points: on that axis.

    Returns:
        A row of `mean_of` for each point, with the point in ``at``.
    """
    return [{"at": p} | mean_of(runs, lambda r, p=p: best_so_far(r["gradings"], axis, p)) for p in points]  # type: ignore[misc]


def summary(runs: Sequence[Mapping[str, Any]], evals: int) -> dict[str, Any]:
    """Return curves and end points of every policy.

    Seconds are compared up to the time at which the first policy ends on average. Beyond it that policy's curve would
    be flat because its gradings are spent, not because it is worse.

    Args:
        runs: rows of ``compare.json``.
        evals: gradings of each run.

    Returns:
        The ``summary`` of ``compare.json``.
    """
    names = list(dict.fromkeys(r["policy"] for r in runs))
    done = {n: {(r["task"], r["seed"]) for r in runs if r["policy"] == n} for n in names}
    shared = set.intersection(*done.values()) if done else set()
    # After an interruption only runs (task, seed) of all policies are compared.
    of = {n: [r for r in runs if r["policy"] == n and (r["task"], r["seed"]) in shared] for n in names}
    names = [n for n in names if of[n]]
    spans = {n: _mean([r["seconds"] for r in of[n]]) for n in names}
    longest, common = max(spans.values(), default=0.0), min(spans.values(), default=0.0)
    seconds = [longest * k / POINTS for k in range(1, POINTS + 1)]
    summarised: dict[str, Any] = {
        "common_seconds": common, "tasks": len({t for t, _ in shared}), "seeds": len({k for _, k in shared}), "policies": {},
    }  # fmt: skip
    for n in names:
        summarised["policies"][n] = {
            "by_gradings": curve(of[n], "number", range(1, evals + 1)),
            "by_seconds": curve(of[n], "seconds", seconds),
            "at_common_seconds": mean_of(of[n], lambda r: best_so_far(r["gradings"], "seconds", common)),
            "best_graded": mean_of(of[n], lambda r: best_so_far(r["gradings"], "number", evals)),
            "handed_in": mean_of(of[n], lambda r: r["handed_in"]),
            "gradings": _mean([len(r["gradings"]) for r in of[n]]),
            "correct_share": _share([g["correct"] for r in of[n] for g in r["gradings"]]),
            "seconds": spans[n],
        }
    return summarised


def _share(found: Sequence[bool]) -> float | None:
    return sum(found) / len(found) if found else None


def check() -> None:
    """Check before a long run that its picture can be drawn.

    Raises:
        UsageError: matplotlib is not installed.
    """
    style.check("the figure needs", ", or use --no-figure")


def draw(result: Mapping[str, Any], file: Path) -> None:
    """Draw the best value so far against gradings and against seconds, with intervals.

    Args:
        result: content of ``compare.json``.
        file: the picture.

    Raises:
        UsageError: matplotlib is not installed, or the file cannot be written.
    """
    check()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4.6), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, sharey=True)
    for axes, key, label in ((left, "by_gradings", "gradings"), (right, "by_seconds", "seconds of the policy's own time")):
        for k, (name, p) in enumerate(result["summary"]["policies"].items()):
            rows = [r for r in p[key] if r["mean"] is not None]
            colour = _COLOURS[k % len(_COLOURS)]
            at = [r["at"] for r in rows]
            axes.step(at, [r["mean"] for r in rows], where="post", color=colour, label=name, linewidth=1.8)
            wide = [r for r in rows if r["low"] is not None]
            axes.fill_between([r["at"] for r in wide], [r["low"] for r in wide], [r["high"] for r in wide], step="post",
                              color=colour, alpha=0.15, linewidth=0)  # fmt: skip
        axes.axhline(0.0, color="#999999", linewidth=0.8, linestyle=":")
        axes.set_xlabel(label)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    right.axvline(result["summary"]["common_seconds"], color="#999999", linewidth=0.8, linestyle="--")
    left.set_ylabel(result["value"])
    left.legend(frameon=False, loc="best")
    held = result["summary"]
    figure.suptitle(
        f"best graded so far: {held['tasks']} tasks, {held['seeds']} seeds, "
        f"{result['backend']}; bands: 95 % over tasks and seeds", x=0.01, ha="left",
    )  # fmt: skip
    try:
        figure.savefig(file, dpi=110)
    except (OSError, ValueError) as e:
        raise UsageError(f"cannot write the picture {str(file)!r}: {e}; give a writable folder") from e
