"""Statistics for `train_evidence.py`: means with intervals, differences of pairs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

DRAWS = 4000
"""Of a bootstrap."""


Asked = set[tuple[str, int]]
"""Task and sample."""


def cells(rows: Sequence[Mapping[str, Any]], kind: str, value: str, tasks: Sequence[str], asked: Asked) -> np.ndarray:
    """(seeds, tasks) of means over samples; nan where nothing is known. A masked sample (None) is left out, not 0."""
    mine = [r for r in rows if r["kind"] == kind and (r["task"], r["sample"]) in asked and r[value] is not None]
    seeds = sorted({r["seed"] for r in rows if r["kind"] == kind})
    found = np.full((len(seeds), len(tasks)), np.nan)
    for i, seed in enumerate(seeds):
        for j, task in enumerate(tasks):
            known = [r[value] for r in mine if (r["seed"], r["task"]) == (seed, task)]
            if known:
                found[i, j] = sum(known) / len(known)
    return found


def interval(of: np.ndarray, seed: int = 0) -> dict[str, Any]:
    """The mean with a 95 % percentile bootstrap over seeds and tasks, both drawn; of one seed over tasks alone."""
    if not of.size or np.isnan(of).all():
        return {"mean": None, "low": None, "high": None, "seeds": int(of.shape[0]), "tasks": 0}
    draw = np.random.default_rng(seed)
    n, m = of.shape
    # How often each seed and each task is drawn; weights instead of copies.
    often = [draw.multinomial(k, np.full(k, 1 / k), DRAWS).astype(float) for k in (n, m)]
    total, count = (np.einsum("di,ij,dj->d", often[0], x, often[1]) for x in (np.nan_to_num(of), (~np.isnan(of)).astype(float)))
    means = total[count > 0] / count[count > 0]
    low, high = np.quantile(means, [0.025, 0.975])
    return {"mean": round(float(np.nanmean(of)), 5), "low": round(float(low), 5), "high": round(float(high), 5), "seeds": n,
            "tasks": int((~np.isnan(of)).any(0).sum())}  # fmt: skip


def compared(rows: Sequence[Mapping[str, Any]], kinds: Sequence[str]) -> dict[str, Any]:
    """Mean rewards of every kind, and differences of pairs of the same seed and task.

    Only what every checkpoint was asked and answered in time counts. ``first``: the first answer's reward; ``best``: the
    episode's, which a row lacks that was written after its first answer.
    """
    kinds = [k for k in kinds if any(r["kind"] == k for r in rows)]
    runs = {(r["kind"], r["seed"]) for r in rows}
    tasks = sorted({r["task"] for r in rows})
    found: dict[str, Any] = {"tasks": len(tasks), "runs": sorted(f"{k}-{s}" for k, s in runs)}
    for value in ("first", "best", "compiled", "correct"):
        sets: list[Asked] = [
            {(r["task"], r["sample"]) for r in rows if (r["kind"], r["seed"]) == run and value in r} for run in runs
        ]
        asked: Asked = set.intersection(*sets) if sets else set()
        held = {k: cells(rows, k, value, tasks, asked) for k in kinds} if asked else {}
        told: dict[str, Any] = {"answers": len(asked), **{k: interval(v) for k, v in held.items()}}
        for a, b in (("single", "sft"), ("multi", "sft"), ("multi", "single")):
            if a in held and b in held:
                # The same number stands for the same draws of answers; a run that is lacking leaves its pair out.
                both = sorted({s for k, s in runs if k == a} & {s for k, s in runs if k == b})
                sides = [held[k][[sorted(s for x, s in runs if x == k).index(s) for s in both]] for k in (a, b)]
                told[f"{a} - {b}"] = interval(sides[0] - sides[1])
        found[value] = told
    return found


def quarters(lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Training reward and rates over the first and the last quarter of a run's gradings."""
    lines = [x for x in lines if x.get("gradings")]
    if not lines:
        return {}
    end = lines[-1]["gradings"]
    told: dict[str, Any] = {"gradings": end, "steps": len(lines), "seconds": lines[-1]["seconds"]}
    for name, some in (("first", [x for x in lines if x["gradings"] <= end / 4] or lines[:1]),
                       ("last", [x for x in lines if x["gradings"] > 3 * end / 4])):  # fmt: skip
        for key in ("reward", "compile_rate", "correct_rate", "masked"):
            known = [x[key] for x in some if x.get(key) is not None]
            told[f"{key}_{name}_quarter"] = round(sum(known) / len(known), 5) if known else None
    return told


def beside(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Rewards of schedules less the default's, by task: means over repetitions, and how far repetitions lie apart."""
    found: dict[str, Any] = {}
    for name in ("policy", "best"):
        told, gains = {}, []
        for task in sorted({r["task"] for r in rows}):
            one = {k: [r["reward"] for r in rows if (r["task"], r["schedule"]) == (task, k) and r["reward"] is not None]
                   for k in ("default", name)}  # fmt: skip
            if all(one.values()):
                gains.append(float(np.mean(one[name]) - np.mean(one["default"])))
                told[task] = {
                    "gain": round(gains[-1], 5), "default": round(float(np.mean(one["default"])), 5), "n": len(one[name]),
                    "spread": [round(float(np.ptp(one[k])), 5) for k in ("default", name)],
                }  # fmt: skip
        found[name] = {"tasks": told, "gain": interval(np.array([gains])) if gains else None}
    return found
