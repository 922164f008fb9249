"""Statistics of `train_evidence.py`: means with intervals, differences of pairs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

DRAWS = 4000
"""Draws of a bootstrap."""


Samples = set[tuple[str, int]]
"""Pairs of a task and the number of a sample."""


def cells(rows: Sequence[Mapping[str, Any]], kind: str, value: str, tasks: Sequence[str], samples: Samples) -> np.ndarray:
    """Return means over samples by seed and task.

    Args:
        rows: rows of an evaluation.
        kind: the kind of checkpoint.
        value: the column.
        tasks: the tasks.
        samples: the samples that count.

    Returns:
        (seeds, tasks) means; nan where nothing is known. A masked sample (``None``) is left out and does not count as 0.
    """
    known_rows = [r for r in rows if r["kind"] == kind and (r["task"], r["sample"]) in samples and r[value] is not None]
    seeds = sorted({r["seed"] for r in rows if r["kind"] == kind})
    found = np.full((len(seeds), len(tasks)), np.nan)
    for i, seed in enumerate(seeds):
        for j, task in enumerate(tasks):
            known = [r[value] for r in known_rows if (r["seed"], r["task"]) == (seed, task)]
            if known:
                found[i, j] = sum(known) / len(known)
    return found


def interval(of: np.ndarray, seed: int = 0) -> dict[str, Any]:
    """Return the mean with a 95 % percentile bootstrap that draws seeds and tasks.

    Args:
        of: (seeds, tasks) values; nan where not known.
        seed: seed of the draws.

    Returns:
        ``mean``, ``low``, ``high``, and numbers of ``seeds`` and ``tasks``.
    """
    if not of.size or np.isnan(of).all():
        return {"mean": None, "low": None, "high": None, "seeds": int(of.shape[0]), "tasks": 0}
    draw = np.random.default_rng(seed)
    n, m = of.shape
    # How often each seed and each task is drawn, as weights.
    often = [draw.multinomial(k, np.full(k, 1 / k), DRAWS).astype(float) for k in (n, m)]
    total, count = (np.einsum("di,ij,dj->d", often[0], x, often[1]) for x in (np.nan_to_num(of), (~np.isnan(of)).astype(float)))
    means = total[count > 0] / count[count > 0]
    low, high = np.quantile(means, [0.025, 0.975])
    return {"mean": round(float(np.nanmean(of)), 5), "low": round(float(low), 5), "high": round(float(high), 5), "seeds": n,
            "tasks": int((~np.isnan(of)).any(0).sum())}  # fmt: skip


def compared(rows: Sequence[Mapping[str, Any]], kinds: Sequence[str]) -> dict[str, Any]:
    """Return mean rewards of every kind of checkpoint, and differences of pairs of the same seed and task.

    Only samples that every checkpoint has answered in time count. ``first`` is the reward of the first answer, ``best`` that of the
    episode, which a row lacks if only its first answer was graded in time.

    Args:
        rows: rows of an evaluation.
        kinds: the kinds of checkpoints.

    Returns:
        Figures as plain JSON types.
    """
    kinds = [k for k in kinds if any(r["kind"] == k for r in rows)]
    runs = {(r["kind"], r["seed"]) for r in rows}
    tasks = sorted({r["task"] for r in rows})
    found: dict[str, Any] = {"tasks": len(tasks), "runs": sorted(f"{k}-{s}" for k, s in runs)}
    for value in ("first", "best", "compiled", "correct"):
        sets: list[Samples] = [
            {(r["task"], r["sample"]) for r in rows if (r["kind"], r["seed"]) == run and value in r} for run in runs
        ]
        samples: Samples = set.intersection(*sets) if sets else set()
        held = {k: cells(rows, k, value, tasks, samples) for k in kinds} if samples else {}
        figures: dict[str, Any] = {"answers": len(samples), **{k: interval(v) for k, v in held.items()}}
        for a, b in (("single", "sft"), ("multi", "sft"), ("multi", "single")):
            if a in held and b in held:
                # Equal seeds draw equal random numbers. A pair with a missing run is left out.
                both = sorted({s for k, s in runs if k == a} & {s for k, s in runs if k == b})
                sides = [held[k][[sorted(s for x, s in runs if x == k).index(s) for s in both]] for k in (a, b)]
                figures[f"{a} - {b}"] = interval(sides[0] - sides[1])
        found[value] = figures
    return found


def quarters(lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return training reward and rates over the first and the last quarter of a run's gradings, from the lines of its log."""
    lines = [x for x in lines if x.get("gradings")]
    if not lines:
        return {}
    end = lines[-1]["gradings"]
    figures: dict[str, Any] = {"gradings": end, "updates": lines[-1].get("step", len(lines)), "seconds": lines[-1]["seconds"]}
    for name, some in (("first", [x for x in lines if x["gradings"] <= end / 4] or lines[:1]),
                       ("last", [x for x in lines if x["gradings"] > 3 * end / 4])):  # fmt: skip
        for key in ("reward", "compile_rate", "correct_rate", "masked"):
            known = [x[key] for x in some if x.get(key) is not None]
            figures[f"{key}_{name}_quarter"] = round(sum(known) / len(known), 5) if known else None
    return figures


def beside(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Compare schedules with the unchanged experts: for each kind of sizes the policies' choices and the best ones of training.

    ``speedup_over_default`` is exp of the mean over seeds and tasks of log(speedup / the default's), each the mean over
    repetitions, which time both. ``by`` says whether speedups were measured, or estimated as on a CPU. ``gain`` is the reward minus
    the default's. ``failed`` has the schedules that were not correct, by task; they are in no mean.

    Args:
        rows: gradings of schedules.

    Returns:
        Figures as plain JSON types.
    """
    found: dict[str, Any] = {}
    for sizes in dict.fromkeys(r["sizes"] for r in rows):
        some = [r for r in rows if r["sizes"] == sizes]
        found[sizes] = {name: _beside(some, name) for name in ("policy", "best")}
    return found


def _beside(rows: Sequence[Mapping[str, Any]], name: str) -> dict[str, Any]:
    tasks, seeds = sorted({r["task"] for r in rows}), sorted({r["seed"] for r in rows if r["schedule"] == name})
    default = {(r["task"], r["repetition"]): r for r in rows if r["schedule"] == "default"}
    logs, gains = (np.full((len(seeds), len(tasks)), np.nan) for _ in range(2))
    figures: dict[str, Any] = {}
    for j, task in enumerate(tasks):
        for i, seed in enumerate(seeds):
            pairs = [(r, d) for r in rows if (r["schedule"], r["seed"], r["task"]) == (name, seed, task)
                     if (d := default.get((task, r["repetition"])))]  # fmt: skip
            ratios = [math.log(a / b) for r, d in pairs if (a := _worth(r)) and (b := _worth(d))]
            paid = [r["reward"] - d["reward"] for r, d in pairs if None not in (r["reward"], d["reward"])]
            if ratios:
                logs[i, j] = np.mean(ratios)
                figures.setdefault(task, {})[str(seed)] = {
                    "ratio": round(math.exp(logs[i, j]), 5), "n": len(ratios),
                    "low": round(math.exp(min(ratios)), 5), "high": round(math.exp(max(ratios)), 5),
                }  # fmt: skip
            if paid:
                gains[i, j] = np.mean(paid)
    speedup = interval(logs)
    for key in ("mean", "low", "high"):
        speedup[key] = None if speedup[key] is None else round(math.exp(speedup[key]), 5)
    failed = {r["task"]: r["verdict"] for r in rows if r["schedule"] == name and r["verdict"] not in ("correct", "infra_fault")}
    measured = any(r["speedup"] for r in rows)
    return {"speedup_over_default": speedup, "by": "measured" if measured else "estimated", "gain": interval(gains),
            "failed": failed, "tasks": figures}  # fmt: skip


def _worth(row: Mapping[str, Any]) -> float | None:
    """Return the measured speedup of a schedule, or else its estimated share of the roofline: ratios of both mean the same."""
    found: float | None = row["speedup"] or row["share"]
    return found


def curves(work: Path, presets: Mapping[str, str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Compare shaped with unshaped rewards by the gradings needed for the unshaped runs' final rates.

    Args:
        work: folder of the runs' folders, ``PRESET-shaped-SEED`` and ``PRESET-unshaped-SEED``.
        presets: patterns of tasks by preset.

    Returns:
        Figures by preset, and the same with curves. ``lacking`` names the runs that cannot be compared.
    """
    from kbx_env.rewards.compose import load_preset
    from kbx_env.train import reward_curves

    from kbx_env.errors import UsageError

    short, with_curves = dict[str, Any](), dict[str, Any]()
    for preset in presets:
        lacking, logs = [], dict[tuple[str, int], list[dict[str, Any]]]()
        for kind in ("unshaped", "shaped"):  # the second kind is compared with the first
            for folder in sorted(p for p in work.glob(f"{preset}-{kind}-*") if p.is_dir()):  # the folder also has the files of jobs
                try:
                    lines = reward_curves.lines_of(folder)
                    key = (kind, int(folder.name.rpartition("-")[2]))
                    reward_curves.runs_of({key: lines}, {})
                    logs[key] = lines
                except UsageError as e:
                    lacking.append(f"{folder.name}: {e}")
        if {k for k, _ in logs} == {"unshaped", "shaped"}:
            runs, terms = reward_curves.runs_of(logs, load_preset("default").weights)
            figures = _rounded(reward_curves.compare(runs)) | {"base_terms": terms, "lacking": lacking}
            with_curves[preset] = figures
            metrics = {m: {n: {k: v for k, v in x.items() if k != "curve"} for n, x in of.items()}
                       for m, of in figures["metrics"].items()}  # fmt: skip
            short[preset] = {k: v for k, v in figures.items() if k != "intervals"} | {"metrics": metrics}
        else:
            short[preset] = with_curves[preset] = {"lacking": lacking or ["no runs"]}
    return short, with_curves


def _rounded(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {k: _rounded(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(v) for v in value]
    return round(value, 5) if isinstance(value, float) else value
