"""Learning curves of training runs with several reward presets, and figures with intervals over seeds.

The rewards of two presets are not comparable, so this module compares metrics that mean the same under every preset: correct
rate, compile rate, share of telling cases, and base reward (the terms by the first preset's weights). Pure functions of logs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from kbx_env.eval.stats import DRAWS, LEVEL

from kbx_env import jsonl
from kbx_env.errors import UsageError

METRICS = {
    "correct": "correct rate", "compiles": "compile rate", "cases": "share of telling cases", "base": "base reward",
}  # fmt: skip
"""Names of the metrics, as they are shown."""
RATES = ("correct", "compiles", "cases")
"""Metrics between 0 and 1."""
WINDOW = 0.1
"""Width of the centred window of a curve's point, as a share of the budget of gradings."""
FINAL = 0.2
"""Share of the budget at its end that a final value is the mean of."""
POINTS = 181
"""Points of a curve."""
_LOGGED = {"correct": "correct_rate", "compiles": "compile_rate", "cases": "terms/cases"}
Array = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True)
class Run:
    """The log of one run."""

    preset: str
    seed: int
    gradings: Array
    """(steps,) gradings so far at the end of each step."""
    values: Mapping[str, Array]
    """By metric (steps,) the step's mean; nan where it is not known."""
    seconds: float

    @property
    def spent(self) -> float:
        """Gradings in all."""
        return float(self.gradings[-1])

    def mean(self, metric: str, begin: Array, end: Array) -> Array:
        """Return the mean over the gradings of each window. All gradings of a step have its value; unknown steps are left out.

        Args:
            metric: one of ``METRICS``.
            begin: (n,) beginnings of windows, in gradings.
            end: (n,) their ends.

        Returns:
            (n,) means; nan where nothing in the window is known.
        """
        width, value = np.diff(self.gradings, prepend=0.0), self.values[metric]
        known = ~np.isnan(value)
        at = np.concatenate([[0.0], self.gradings])
        total, count = (np.concatenate([[0.0], np.cumsum(width * v)]) for v in (np.where(known, value, 0.0), known))
        some = np.interp(end, at, count) - np.interp(begin, at, count)
        held = np.interp(end, at, total) - np.interp(begin, at, total)
        return np.divide(held, some, out=np.full(np.shape(held), np.nan), where=some > 1e-9)

    def ever(self, metric: str) -> bool:
        """Return whether a metric was above 0 at any step."""
        return bool(np.any(np.nan_to_num(self.values[metric]) > 0))


def lines_of(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of a run's ``log.jsonl`` that have gradings, one for each step. Incomplete lines are left out.

    Args:
        folder: folder of the run.

    Returns:
        The lines, in the order of steps.

    Raises:
        UsageError: there is no log, it has no gradings, or its gradings decrease, so that it is not the log of one run.
    """
    path = folder / "log.jsonl"
    if not path.is_file():
        raise UsageError(f"no log of a run: {path}; leave out --report-only to run it")
    steps: dict[int, dict[str, Any]] = {}
    for line in jsonl.read(path, skip_broken=True):
        if isinstance(line, dict) and isinstance(line.get("gradings"), int | float) and "step" in line:
            steps[line["step"]] = line
    found = [steps[s] for s in sorted(steps)]
    if not found or not found[-1]["gradings"] > 0:
        raise UsageError(f"{path} tells of no grading; remove that folder and run it again")
    if any(b["gradings"] < a["gradings"] for a, b in zip(found, found[1:])):
        raise UsageError(f"{path}: gradings go back between steps; they are counted from the beginning of a run")
    return found


Logs = Mapping[tuple[str, int], Sequence[Mapping[str, Any]]]
"""Lines of logs by preset and seed."""


def runs_of(logs: Logs, weights: Mapping[str, float]) -> tuple[list[Run], list[str]]:
    """Read the metrics of runs.

    Args:
        logs: their logs.
        weights: weights of the terms of the base reward.

    Returns:
        The runs, and the terms of the base reward: those in ``weights`` that every run has logged.

    Raises:
        UsageError: a run without any correct or compile rate.
    """
    logged = [set().union(*lines) for lines in logs.values()]
    terms = [t for t in weights if all(f"terms/{t}" in keys for keys in logged)]
    found = []
    for (preset, seed), lines in logs.items():
        values = {m: _column(lines, key) for m, key in _LOGGED.items()}
        for m in ("correct", "compiles"):
            if np.isnan(values[m]).all():  # else it would count as 0 solved although nothing was graded
                raise UsageError(f"{preset}, seed {seed}: no step has a {_LOGGED[m]}; masked gradings alone tell nothing")
        parts = [weights[t] * _column(lines, f"terms/{t}") for t in terms]
        known = [p for p in parts if not np.isnan(p).all()]  # without a GPU the term of speed is unknown
        values["base"] = np.sum(known, axis=0) if known else np.full(len(lines), np.nan)
        gradings = np.array([x["gradings"] for x in lines], dtype=float)
        found.append(Run(preset, seed, gradings, values, float(lines[-1].get("seconds") or 0.0)))
    return found, terms


def _column(lines: Sequence[Mapping[str, Any]], key: str) -> Array:
    return np.array([math.nan if x.get(key) is None else float(x[key]) for x in lines])


def compare(runs: Sequence[Run]) -> dict[str, Any]:
    """Compare runs.

    Args:
        runs: the runs. The other presets are compared with the preset of the first one.

    Returns:
        All figures and curves, as plain JSON types.
    """
    names = list(dict.fromkeys(r.preset for r in runs))
    of = {n: [r for r in runs if r.preset == n] for n in names}
    budget = min(r.spent for r in runs)
    solved = any(r.ever("correct") for r in runs)
    metrics = {}
    for metric in METRICS:
        if all(np.isnan(r.values[metric]).all() for r in runs):
            continue
        made = {n: Curves.of(of[n], metric, budget) for n in names}
        metrics[metric] = {n: _figures(metric, made[n], None if n == names[0] else made[names[0]]) for n in names}
    return {
        "presets": names, "first": names[0], "seeds": {n: [r.seed for r in of[n]] for n in names},
        "budget_gradings": budget, "final_share": FINAL, "smoothing_gradings": WINDOW * budget,
        "solved": solved, "headline": "correct" if solved else "compiles",
        "runs": [
            {"preset": r.preset, "seed": r.seed, "gradings": r.spent, "seconds": r.seconds, "steps": len(r.gradings)}
            for r in runs
        ],
        "intervals": f"{LEVEL:.0%}: t over seeds for rates and curves, Welch for differences, expanded percentile bootstrap over "
                     f"seeds ({DRAWS} draws) for ratios",
        "metrics": metrics,
    }  # fmt: skip


@dataclass(frozen=True)
class Curves:
    """Smoothed curves of a preset's seeds, and their final values."""

    grid: Array
    """(points,) gradings."""
    rows: Array
    """(seeds, points) values; nan where not known."""
    final: Array
    """(seeds,) final values."""
    end: float
    """The last point of the grid."""

    @classmethod
    def of(cls, runs: Sequence[Run], metric: str, budget: float) -> Curves:
        """Make the curves of a metric, at points whose whole window lies within the budget: shorter windows would be noisier.

        Args:
            runs: the runs of one preset.
            metric: one of ``METRICS``.
            budget: gradings that every run has.

        Returns:
            The curves.
        """
        half = WINDOW * budget / 2
        grid = np.linspace(half, budget - half, POINTS)
        rows = np.array([r.mean(metric, grid - half, grid + half) for r in runs])
        last = [float(r.mean(metric, np.array([(1 - FINAL) * budget]), np.array([budget]))[0]) for r in runs]
        return cls(grid, rows, np.array(last), float(grid[-1]))

    def reached(self, target: float, draw: Any = None) -> float | None:
        """Return the gradings at which the mean curve first reaches a target; ``None`` where it never does.

        Args:
            target: the value to reach.
            draw: numbers of the rows whose mean is taken; by default all.

        Returns:
            Gradings.
        """
        return crossing(self.grid, _mean(self.rows if draw is None else self.rows[draw]), target)


def _mean(rows: Array) -> Array:
    known = ~np.isnan(rows)
    count = known.sum(0)
    total: Array = np.where(known, rows, 0.0).sum(0)
    return np.divide(total, count, out=np.full(rows.shape[1], np.nan), where=count > 0)


def crossing(grid: Array, curve: Array, target: float) -> float | None:
    """Return where a curve first reaches a target, with straight lines between its points.

    Args:
        grid: (points,) positions.
        curve: (points,) values; nan where not known.
        target: the value to reach.

    Returns:
        The position; the first known one if the curve starts at the target, ``None`` where it never reaches it.
    """
    there = np.nonzero(np.nan_to_num(curve, nan=-math.inf) >= target - 1e-9)[0]
    if not len(there):
        return None
    k = int(there[0])
    if k == 0 or np.isnan(curve[k - 1]):
        return float(grid[k])
    share = (target - curve[k - 1]) / (curve[k] - curve[k - 1])
    return float(grid[k - 1] + min(1.0, max(0.0, share)) * (grid[k] - grid[k - 1]))


def interval(values: Sequence[float] | Array, top: float = math.inf) -> dict[str, Any]:
    """Return mean and t interval over seeds.

    Args:
        values: one value for each seed; nan is left out.
        top: the interval is cut to [0, ``top``].

    Returns:
        ``value``, ``low``, ``high`` and number of ``seeds``; no interval (``None``) where no two seeds differ, since nothing is
        known of their spread.
    """
    from scipy.stats import t

    v = np.array([x for x in values if not math.isnan(x)])
    if not len(v):
        return {"value": None, "low": None, "high": None, "seeds": 0}
    mean, half = float(v.mean()), None
    if len(v) > 1 and np.ptp(v) > 1e-12:
        half = float(t.ppf(0.5 + LEVEL / 2, len(v) - 1) * v.std(ddof=1) / math.sqrt(len(v)))
    low, high = (None, None) if half is None else (max(0.0, mean - half), min(top, mean + half))
    return {"value": mean, "low": low, "high": high, "seeds": len(v)}


def difference(one: Array, other: Array) -> dict[str, Any]:
    """Return the difference of two means with Welch's interval (1947).

    Args:
        one: one value for each seed; nan is left out.
        other: what is subtracted, likewise.

    Returns:
        ``value``, ``low`` and ``high``; no interval (``None``) for single seeds or where no two seeds differ.
    """
    from scipy.stats import t

    a, b = (v[~np.isnan(v)] for v in (one, other))
    if not len(a) or not len(b):
        return {"value": None, "low": None, "high": None}
    value, half = float(a.mean() - b.mean()), None
    if min(len(a), len(b)) > 1 and max(np.ptp(a), np.ptp(b)) > 1e-12:
        u, w = a.var(ddof=1) / len(a), b.var(ddof=1) / len(b)
        freedom = (u + w) ** 2 / (u**2 / (len(a) - 1) + w**2 / (len(b) - 1))
        half = float(t.ppf(0.5 + LEVEL / 2, freedom) * math.sqrt(u + w))
    return {"value": value, "low": None if half is None else value - half, "high": None if half is None else value + half}


def ratio(first: Curves, other: Curves) -> dict[str, Any]:
    """Return the ratio of the gradings that two presets need to reach the first one's final value.

    The interval is a bootstrap that draws the seeds of both, and the target with them. In a draw in which a curve never reaches
    the target, the ratio is at least what the budget shows, without an upper end.

    Args:
        first: curves of the first preset.
        other: curves of the other one, whose gradings are the numerator.

    Returns:
        ``value`` (``None`` where the target is 0 or not reached), ``low``, ``high``, ``unbounded`` (the interval has no upper
        end), ``never`` (share of draws that do not reach the target) and ``target``.
    """
    seeds, target = min(len(first.rows), len(other.rows)), float(np.mean(first.final))
    none = {"value": None, "low": None, "high": None, "unbounded": False, "never": None, "target": target}
    if math.isnan(target) or target <= 0:
        return none
    a, b = first.reached(target), other.reached(target)
    none["value"] = value = b / a if a and b else None
    if seeds < 2:
        return none
    random, lows, highs, never = np.random.default_rng(0), [], [], 0
    for _ in range(DRAWS):
        i, j = (random.integers(0, len(c.rows), len(c.rows)) for c in (first, other))
        goal = float(np.mean(first.final[i]))
        a, b = (first.reached(goal, i), other.reached(goal, j)) if goal > 0 else (None, None)
        never += b is None
        # A target that is not reached takes more gradings than the budget: that bounds the ratio from one side only.
        lows.append((b or other.end) / a if a else 0.0)
        highs.append(math.inf if b is None else b / (a or first.end))
    if np.unique(np.round([*lows, *highs], 9)).size == 1:
        return none | {"never": never / DRAWS}
    # Quantiles without interpolation: there is none between a number and infinity.
    tail = _tail(len(first.rows), len(other.rows))
    low, high = float(np.quantile(lows, tail, method="lower")), float(np.quantile(highs, 1 - tail, method="higher"))
    if value is not None:
        low, high = min(low, value), max(high, value)
    endless = math.isinf(high)
    return none | {"low": low, "high": None if endless else high, "unbounded": endless, "never": never / DRAWS}


def _tail(n: int, m: int) -> float:
    """Return the percentile at which a bootstrap interval ends, expanded for small numbers of seeds (Hesterberg 2015)."""
    from scipy.stats import norm, t

    few = min(n, m)
    return float(norm.cdf(-math.sqrt(few / (few - 1)) * t.ppf(0.5 + LEVEL / 2, n + m - 2)))


def _figures(metric: str, curves: Curves, first: Curves | None) -> dict[str, Any]:
    """Return the figures of a preset, and of its comparison with the first one unless it is the first."""
    top = 1.0 if metric in RATES else math.inf
    target = float(np.mean((first or curves).final))
    aim = target if target > 0 else None  # nothing is reached at 0 gradings
    points = [interval(column, top) for column in curves.rows.T]
    figures: dict[str, Any] = {
        "final": interval(curves.final, top), "final_per_seed": [_plain(v) for v in curves.final], "target": aim,
        "gradings_to_target": None if aim is None else curves.reached(aim),
        "gradings_to_target_per_seed": [None if aim is None else crossing(curves.grid, row, aim) for row in curves.rows],
    }  # fmt: skip
    if first is not None:
        figures |= {"ratio": ratio(first, curves), "difference": difference(curves.final, first.final)}
    figures["curve"] = {"gradings": curves.grid.round(3).tolist(), **{k: [p[k] for p in points] for k in ("value", "low", "high")}}
    return figures


def _plain(value: float) -> float | None:
    return None if math.isnan(value) else float(value)
