"""Statistics for `train_evidence.py`: means with intervals, differences of pairs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
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
    told: dict[str, Any] = {"gradings": end, "updates": lines[-1].get("step", len(lines)), "seconds": lines[-1]["seconds"]}
    for name, some in (("first", [x for x in lines if x["gradings"] <= end / 4] or lines[:1]),
                       ("last", [x for x in lines if x["gradings"] > 3 * end / 4])):  # fmt: skip
        for key in ("reward", "compile_rate", "correct_rate", "masked"):
            known = [x[key] for x in some if x.get(key) is not None]
            told[f"{key}_{name}_quarter"] = round(sum(known) / len(known), 5) if known else None
    return told


def beside(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Schedules beside the experts as they are: of each kind of sizes, for what the policies choose and for the best of training.

    ``speedup_over_default``: exp of the mean over seeds and tasks of log(speedup / the default's), each the mean over
    repetitions, which time both; ``by`` says whether speedups were measured, or estimated as on a CPU. ``gain``: rewards less the
    default's. ``failed``: schedules that were not correct, by task; they have no speedup and are in no mean.
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
    told: dict[str, Any] = {}
    for j, task in enumerate(tasks):
        for i, seed in enumerate(seeds):
            pairs = [(r, d) for r in rows if (r["schedule"], r["seed"], r["task"]) == (name, seed, task)
                     if (d := default.get((task, r["repetition"])))]  # fmt: skip
            ratios = [math.log(a / b) for r, d in pairs if (a := _worth(r)) and (b := _worth(d))]
            paid = [r["reward"] - d["reward"] for r, d in pairs if None not in (r["reward"], d["reward"])]
            if ratios:
                logs[i, j] = np.mean(ratios)
                told.setdefault(task, {})[str(seed)] = {
                    "ratio": round(math.exp(logs[i, j]), 5), "n": len(ratios),
                    "low": round(math.exp(min(ratios)), 5), "high": round(math.exp(max(ratios)), 5),
                }  # fmt: skip
            if paid:
                gains[i, j] = np.mean(paid)
    whole = interval(logs)
    for key in ("mean", "low", "high"):
        whole[key] = None if whole[key] is None else round(math.exp(whole[key]), 5)
    failed = {r["task"]: r["verdict"] for r in rows if r["schedule"] == name and r["verdict"] not in ("correct", "infra_fault")}
    measured = any(r["speedup"] for r in rows)
    return {"speedup_over_default": whole, "by": "measured" if measured else "estimated", "gain": interval(gains), "failed": failed,
            "tasks": told}  # fmt: skip


def _worth(row: Mapping[str, Any]) -> float | None:
    """Of a schedule: measured speedup, or where none is the estimated share of the roofline; ratios of both mean the same."""
    found: float | None = row["speedup"] or row["share"]
    return found


def curves(work: Path, presets: Mapping[str, str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Runs under shaped rewards beside unshaped ones: gradings needed for the unshaped runs' final rates, by preset.

    Args:
        work: holds the runs' folders, ``PRESET-shaped-SEED`` and ``PRESET-unshaped-SEED``.
        presets: by name.

    Returns:
        Figures, and the same with curves; where runs of either kind tell nothing ``lacking`` says so.
    """
    from kbx_env.rewards.compose import load_preset
    from kbx_env.train import reward_curves

    from kbx_env.errors import UsageError

    short, whole = dict[str, Any](), dict[str, Any]()
    for preset in presets:
        lacking, logs = [], dict[tuple[str, int], list[dict[str, Any]]]()
        for kind in ("unshaped", "shaped"):  # others are compared with the first
            for folder in sorted(p for p in work.glob(f"{preset}-{kind}-*") if p.is_dir()):  # jobs' files are there too
                try:
                    lines = reward_curves.lines_of(folder)
                    key = (kind, int(folder.name.rpartition("-")[2]))
                    reward_curves.runs_of({key: lines}, {})
                    logs[key] = lines
                except UsageError as e:
                    lacking.append(f"{folder.name}: {e}")
        if {k for k, _ in logs} == {"unshaped", "shaped"}:
            runs, terms = reward_curves.runs_of(logs, load_preset("default").weights)
            told = _rounded(reward_curves.compare(runs)) | {"base_terms": terms, "lacking": lacking}
            whole[preset] = told
            metrics = {m: {n: {k: v for k, v in x.items() if k != "curve"} for n, x in of.items()}
                       for m, of in told["metrics"].items()}  # fmt: skip
            short[preset] = {k: v for k, v in told.items() if k != "intervals"} | {"metrics": metrics}
        else:
            short[preset] = whole[preset] = {"lacking": lacking or ["no runs"]}
    return short, whole


def _rounded(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {k: _rounded(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(v) for v in value]
    return round(value, 5) if isinstance(value, float) else value
