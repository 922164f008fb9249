"""The steps of `train_evidence.py` that evaluate: checkpoints on the eval split, and schedules beside experts."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import sys
from pathlib import Path
from typing import Any

from experiments.learning_evidence.budget import say
from experiments.learning_evidence.evidence import ROOT, Evidence, lines_of
from experiments.learning_evidence.jobs import MARKS
from experiments.learning_evidence.learn import answer_of, checkpoint_of
from experiments.learning_evidence.stats import beside, compared

KINDS = ("sft", "single", "multi")
"""Kinds of checkpoints."""
_RUN = re.compile(r"(single|multi)-(\d+)")


def common(work: Path) -> tuple[str, dict[str, dict[str, int]], list[str]]:
    """Find the last checkpoint that all runs of GRPO in a work folder have reached.

    Args:
        work: the work folder.

    Returns:
        The folder of that mark (``final`` where a run reached none), gradings and updates there by run, and the names of the runs
        without any checkpoint.
    """
    names = sorted(p.name for p in work.iterdir() if p.is_dir() and _RUN.fullmatch(p.name))
    reached = {n: max((k for k in range(1, MARKS + 1) if (work / n / f"at-{k}").is_dir()), default=0) for n in names}
    # A run without any checkpoint does not count: else the others could not be compared at a mark.
    found = {n: k for n, k in reached.items() if k or checkpoint_of(work / n / "final")}
    folder = f"at-{mark}" if (mark := min(found.values(), default=0)) else "final"
    counts = {n: c for n in found if (c := checkpoint_of(work / n / folder))}
    return folder, counts, sorted(set(names) - set(counts))


def report(e: Evidence) -> None:
    """Evaluate the SFT checkpoint and every run, at the same number of gradings, on the eval split or on train tasks.

    Args:
        e: the run of the script.

    Raises:
        RuntimeError: there is no checkpoint.
    """
    a, seconds = e.a, e.budget.take("report")
    if e.model is None:
        raise RuntimeError("there is no checkpoint to evaluate: --model, or --work of a command that trained one")
    mark, counts, without = common(e.work)
    for n in without:
        e.result["failures"].setdefault(n, f"no checkpoint {mark}, at which runs are compared; it is left out")
    e.result["compared_at"] = {"mark": mark, "of": MARKS, "equal": mark != "final", "runs": counts}
    say(f"compared at {e.result['compared_at']}")
    seeds = sorted({int(n.split("-")[1]) for n in counts} or range(a.seeds))
    folders = {f"sft-{k}": e.model for k in seeds} | {n: e.work / n / mark for n in counts}
    options = {
        "backend": a.backend, "wall": a.wall, "turns": a.turns, "length": a.length, "temperature": a.temperature, "min_p": a.min_p,
        "room": answer_of(a.turns, a.length, a.feedback), "round": a.round,
        "split": "train" if a.report_on else "eval", "tasks": a.report_on or "*",
    }  # fmt: skip
    (e.work / "rows").mkdir(exist_ok=True)
    commands, rows_of = {}, {}
    for name, folder in folders.items():
        # A later command with the same settings does the missing samples only.
        key = hashlib.sha256(json.dumps([options, _weights(folder)], sort_keys=True).encode()).hexdigest()[:8]
        rows_of[name] = e.work / f"rows/{name}-{key}.jsonl"
        commands[f"report-{name}"] = e.job(
            f"report-{name}", seconds, kind="evaluate", model=str(folder), samples=a.samples, seed=1000 + int(name.split("-")[1]),
            workers=a.workers or math.ceil(e.cores / len(folders)), rows=str(rows_of[name]), **options,
        )  # fmt: skip

    def collect(last: bool) -> None:
        rows = list({
            (n, r["task"], r["sample"]): {"kind": n.split("-")[0], "seed": int(n.split("-")[1]), **r}  # the later one has more
            for n, file in rows_of.items() for r in lines_of(file)
        }.values())  # fmt: skip
        e.files["evaluation"] = rows
        e.result["evaluation"] = {"settings": options, "all": compared(rows, KINDS)}
        if a.eval_tasks:
            some = _ids(a.eval_tasks)
            figures = compared([r for r in rows if r["task"] in some], KINDS)
            e.result["evaluation"]["subset"] = {"pattern": a.eval_tasks, **figures}

    e.collectors["report"] = collect
    e.run("report", commands, seconds, lambda: "; ".join(f"{n} {len(lines_of(f))} rows" for n, f in rows_of.items()))
    collect(True)
    for which in ("all", "subset"):
        for value in ("first", "best"):
            figures = e.result["evaluation"].get(which, {}).get(value, {})
            for name, x in list(figures.items())[1:]:
                say(f"{which}, {value} answer, {name}: {x['mean']} [{x['low']}, {x['high']}]")


def _weights(folder: Path) -> list[Any]:
    """Return what distinguishes a checkpoint from a later one in the same folder: size and time of its files."""
    files = sorted(folder.glob("*.safetensors"))
    return [str(folder), *([f.name, f.stat().st_size, f.stat().st_mtime_ns] for f in files)]


def _ids(pattern: str) -> set[str]:
    from kbx_env.spec.catalog import load_tasks

    return {t.id for t in load_tasks(split="eval", pattern=pattern)}


def ppo(e: Evidence) -> None:
    """Train schedules at published sizes, and grade the choices for published and held-out sizes beside the unchanged experts.

    Args:
        e: the run of the script.

    Raises:
        RuntimeError: PPO finished no iteration, or a folder holds a run on other tasks.
    """
    a, seconds = e.a, e.budget.take("ppo")
    end = e.budget.elapsed + seconds
    backend = "cuda" if e.cuda else "cpu"
    folders = {k: e.work / f"ppo-{k}" for k in range(a.ppo_seeds)}
    # Two cores for each GPU are left for the kernels that are timed. On a fresh machine the first gradings may hold the GPU for a
    # minute (docs/measurements/2026-11-23-h200-learning.md), and other processes wait.
    workers = a.workers or max(1, min(4, (e.cores - 2 * max(1, len(e.gpus))) // a.ppo_seeds))
    minutes = 0.55 * seconds / 60
    commands = {}
    for k, out in folders.items():
        ours = {
            "tasks": a.ppo_tasks, "split": "train", "batch": 16, "minibatch": 16, "lr": 0.002, "entropy": 0.003,
            "workers": workers, "save_every": 1, "iterations": 1000,
            # Near the expert's own schedule: most schedules further away only take the compiler's time.
            "reach": 1, "still": 1.5, "wall": 15,
        }  # fmt: skip
        # A shared store: no seed measures a schedule that another one has measured.
        fixed = {
            "backend": backend, "out": str(out), "seed": k, "minutes": round(minutes, 3),
            "store": str(e.work / "ppo-gradings.sqlite"),
        }  # fmt: skip
        words = [e.settings("ppo", f"ppo-{k}", ours, fixed)]
        if list(out.glob("checkpoints/0*")):  # of an earlier command, whose minutes count
            spent = (lines_of(out / "log.jsonl") or [{}])[-1].get("seconds", 0.0)
            words = [f"resume={out}", f"minutes={minutes + spent / 60:.3f}", f"workers={workers}"]
            trained_on = json.loads((out / "run.json").read_text())["tasks"]
            if trained_on != a.ppo_tasks:
                raise RuntimeError(f"{out} was trained on {trained_on}: give these as --ppo-tasks, or another --work")
        commands[f"ppo-{k}"] = [sys.executable, str(ROOT / "train/ppo.py"), *words]
    graded = e.work / "schedules.jsonl"
    graded.unlink(missing_ok=True)  # those of an earlier command are of an earlier policy

    def collect(last: bool) -> None:
        rows = lines_of(graded)
        logs = {out.name: lines_of(out / "log.jsonl") for out in folders.values()}
        settings = {
            f"{out.name}/{f.stem}": {r["task"]: r["settings"] for r in lines_of(f)} for out in folders.values()
            for f in sorted(out.glob("*.jsonl")) if f.stem.startswith(("policy-", "best-")) and not f.stem.endswith(".default")
        }  # fmt: skip
        e.files["ppo"] = {"log": logs, "settings": settings, "graded": rows}
        counts = {n: {"iterations": len(log), "gradings": log[-1]["gradings"]} for n, log in logs.items() if log}
        e.result["ppo"] = {"backend": backend, "tasks": a.ppo_tasks, "training": counts, **beside(rows)}

    def progress() -> str:
        last = {n: (log or [{}])[-1] for n, log in e.files["ppo"]["log"].items()}
        steps = {out.name: len(lines_of(out / "steps.jsonl")) for out in folders.values()}  # an iteration may take minutes
        return "; ".join(
            f"{n}: {steps[n]} steps, {x.get('gradings', 0)} gradings in iterations, gain {x.get('gain')}" for n, x in last.items()
        )

    e.collectors["ppo"] = collect
    e.run("ppo", commands, 0.65 * seconds, progress)
    trained = {k: str(out) for k, out in folders.items() if list(out.glob("checkpoints/0*"))}
    if not trained:
        raise RuntimeError("PPO ended no iteration in its time")
    left = end - e.budget.elapsed
    command = e.job(
        "schedules", left, kind="schedules", runs=trained, backend=backend, workers=a.workers or max(1, (os.cpu_count() or 1) - 2),
        repetitions=a.repetitions, rows=str(graded),
    )  # fmt: skip
    e.run("schedules", {"schedules": command}, left, lambda: f"schedules: {len(lines_of(graded))} gradings")
    collect(True)
    figures: dict[str, Any] = e.result["ppo"]
    for sizes in ("held-out", "published"):
        say(f"ppo, {sizes}: {json.dumps(figures.get(sizes, {}).get('policy', {}).get('speedup_over_default'))}")
