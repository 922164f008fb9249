"""What training runs of several reward presets show: curves against gradings and figures with intervals over seeds.

Rewards of two presets are not comparable, so nothing here looks at them: correct rate, compile rate, share of telling cases and
base reward (the terms by the first preset's weights) mean the same under every preset. Pure functions of logs.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from kbx_env.eval.stats import DRAWS, LEVEL

from kbx_env.errors import UsageError

METRICS = {
    "correct": "correct rate", "compiles": "compile rate", "cases": "share of telling cases", "base": "base reward",
}  # fmt: skip
RATES = ("correct", "compiles", "cases")
WINDOW, FINAL, POINTS = 0.1, 0.2, 181
"""Share of the budget that a curve's point is a mean over (centred), share that is final, and points of a curve."""
_LOGGED = {"correct": "correct_rate", "compiles": "compile_rate", "cases": "terms/cases"}
Array = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True)
class Run:
    """One log: gradings at the end of each step, and the step's mean of each metric (nan: not known)."""

    preset: str
    seed: int
    gradings: Array
    values: Mapping[str, Array]
    seconds: float

    @property
    def spent(self) -> float:
        """Gradings in all."""
        return float(self.gradings[-1])

    def mean(self, metric: str, begin: Array, end: Array) -> Array:
        """Mean over the gradings of each window; a step's value is that of all its gradings, unknown steps are left out."""
        width, value = np.diff(self.gradings, prepend=0.0), self.values[metric]
        known = ~np.isnan(value)
        at = np.concatenate([[0.0], self.gradings])
        total, count = (np.concatenate([[0.0], np.cumsum(width * v)]) for v in (np.where(known, value, 0.0), known))
        some = np.interp(end, at, count) - np.interp(begin, at, count)
        held = np.interp(end, at, total) - np.interp(begin, at, total)
        return np.divide(held, some, out=np.full(np.shape(held), np.nan), where=some > 1e-9)

    def ever(self, metric: str) -> bool:
        """Whether it was above 0 at any step."""
        return bool(np.any(np.nan_to_num(self.values[metric]) > 0))


def lines_of(folder: Path) -> list[dict[str, Any]]:
    """The steps of a run's ``log.jsonl``, each once; a line that a kill cut off is left out, as are lines that tell no gradings.

    Raises:
        UsageError: there is no such log, nothing in it, or gradings that go back: no log of one run.
    """
    path = folder / "log.jsonl"
    if not path.is_file():
        raise UsageError(f"no log of a run: {path}; leave out --report-only to run it")
    steps: dict[int, dict[str, Any]] = {}
    for text in path.read_text(encoding="utf-8").splitlines():
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if isinstance(line, dict) and isinstance(line.get("gradings"), int | float) and "step" in line:
            steps[line["step"]] = line
    found = [steps[s] for s in sorted(steps)]
    if not found or not found[-1]["gradings"] > 0:
        raise UsageError(f"{path} tells of no grading; remove that folder and run it again")
    if any(b["gradings"] < a["gradings"] for a, b in zip(found, found[1:])):
        raise UsageError(f"{path}: gradings go back between steps; they are counted from the beginning of a run")
    return found


Logs = Mapping[tuple[str, int], Sequence[Mapping[str, Any]]]
"""Lines by preset and seed."""


def runs_of(logs: Logs, weights: Mapping[str, float]) -> tuple[list[Run], list[str]]:
    """Runs with their metrics, and the terms of the base reward: those with a weight that every run logged.

    Raises:
        UsageError: a run without any correct or compile rate.
    """
    told = [set().union(*lines) for lines in logs.values()]
    terms = [t for t in weights if all(f"terms/{t}" in keys for keys in told)]
    found = []
    for (preset, seed), lines in logs.items():
        values = {m: _column(lines, key) for m, key in _LOGGED.items()}
        for m in ("correct", "compiles"):
            if np.isnan(values[m]).all():  # or 0 solved would be said of what nobody could grader
                raise UsageError(f"{preset}, seed {seed}: no step has a {_LOGGED[m]}; masked gradings alone tell nothing")
        parts = [weights[t] * _column(lines, f"terms/{t}") for t in terms]
        known = [p for p in parts if not np.isnan(p).all()]  # speed, where there is no GPU
        values["base"] = np.sum(known, axis=0) if known else np.full(len(lines), np.nan)
        gradings = np.array([x["gradings"] for x in lines], dtype=float)
        found.append(Run(preset, seed, gradings, values, float(lines[-1].get("seconds") or 0.0)))
    return found, terms


def _column(lines: Sequence[Mapping[str, Any]], key: str) -> Array:
    return np.array([math.nan if x.get(key) is None else float(x[key]) for x in lines])


def compare(runs: Sequence[Run]) -> dict[str, Any]:
    """Everything about the runs, as plain JSON; the preset of the first run is the one that others are compared with."""
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
    """Smoothed curves of a preset's seeds (rows) on a grid, and their final values."""

    grid: Array
    rows: Array
    final: Array
    end: float

    @classmethod
    def of(cls, runs: Sequence[Run], metric: str, budget: float) -> Curves:
        """Only where the whole window lies within the budget: a shorter one at the ends would be noisier, a moved one late."""
        half = WINDOW * budget / 2
        grid = np.linspace(half, budget - half, POINTS)
        rows = np.array([r.mean(metric, grid - half, grid + half) for r in runs])
        last = [float(r.mean(metric, np.array([(1 - FINAL) * budget]), np.array([budget]))[0]) for r in runs]
        return cls(grid, rows, np.array(last), float(grid[-1]))

    def reached(self, target: float, draw: Any = None) -> float | None:
        """Gradings at which the mean curve (of drawn rows) is first at the target; ``None`` where it never is."""
        return crossing(self.grid, _mean(self.rows if draw is None else self.rows[draw]), target)


def _mean(rows: Array) -> Array:
    known = ~np.isnan(rows)
    count = known.sum(0)
    total: Array = np.where(known, rows, 0.0).sum(0)
    return np.divide(total, count, out=np.full(rows.shape[1], np.nan), where=count > 0)


def crossing(grid: Array, curve: Array, target: float) -> float | None:
    """Where a curve first is at a target, between points on a straight line; a curve that begins there is there at its begin."""
    there = np.nonzero(np.nan_to_num(curve, nan=-math.inf) >= target - 1e-9)[0]
    if not len(there):
        return None
    k = int(there[0])
    if k == 0 or np.isnan(curve[k - 1]):
        return float(grid[k])
    share = (target - curve[k - 1]) / (curve[k] - curve[k - 1])
    return float(grid[k - 1] + min(1.0, max(0.0, share)) * (grid[k] - grid[k - 1]))


def interval(values: Sequence[float] | Array, top: float = math.inf) -> dict[str, Any]:
    """Mean and t interval over seeds, cut to [0, ``top``]; none where no two seeds differ: nothing is known of their spread."""
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
    """``one`` minus ``other`` with Welch's interval (1947); none for single seeds or where none differ."""
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
    """Gradings of ``other`` over those of ``first`` to the first's final value; seeds of both are drawn, and the target with them.

    A curve that never gets there has a ratio of at least what the budget shows, and no upper end: ``never`` is the share of such
    draws, ``unbounded`` says that the interval has no upper end. ``value`` is ``None`` where nothing is to be reached, or is not.
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
        # What is not reached takes more than the budget: on either side of the division that bounds one side only.
        lows.append((b or other.end) / a if a else 0.0)
        highs.append(math.inf if b is None else b / (a or first.end))
    if np.unique(np.round([*lows, *highs], 9)).size == 1:
        return none | {"never": never / DRAWS}
    # Quantiles without interpolation: between a number and infinity lies nothing.
    tail = _tail(len(first.rows), len(other.rows))
    low, high = float(np.quantile(lows, tail, method="lower")), float(np.quantile(highs, 1 - tail, method="higher"))
    if value is not None:
        low, high = min(low, value), max(high, value)
    endless = math.isinf(high)
    return none | {"low": low, "high": None if endless else high, "unbounded": endless, "never": never / DRAWS}


def _tail(n: int, m: int) -> float:
    """The percentile where a bootstrap interval ends, expanded as drawn means of few seeds spread too little (Hesterberg 2015)."""
    from scipy.stats import norm, t

    few = min(n, m)
    return float(norm.cdf(-math.sqrt(few / (few - 1)) * t.ppf(0.5 + LEVEL / 2, n + m - 2)))


def _figures(metric: str, mine: Curves, first: Curves | None) -> dict[str, Any]:
    top = 1.0 if metric in RATES else math.inf
    target = float(np.mean((first or mine).final))
    aim = target if target > 0 else None  # nothing is reached at 0 gradings
    points = [interval(column, top) for column in mine.rows.T]
    told: dict[str, Any] = {
        "final": interval(mine.final, top), "final_per_seed": [_plain(v) for v in mine.final], "target": aim,
        "gradings_to_target": None if aim is None else mine.reached(aim),
        "gradings_to_target_per_seed": [None if aim is None else crossing(mine.grid, row, aim) for row in mine.rows],
    }  # fmt: skip
    if first is not None:
        told |= {"ratio": ratio(first, mine), "difference": difference(mine.final, first.final)}
    told["curve"] = {"gradings": mine.grid.round(3).tolist(), **{k: [p[k] for p in points] for k in ("value", "low", "high")}}
    return told


def _plain(value: float) -> float | None:
    return None if math.isnan(value) else float(value)
