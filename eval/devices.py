"""Compares the speedups of one policy on several devices."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass

from kbx_env.eval.report_data import PolicyStudy, Study
from kbx_env.eval.stats import Result


@dataclass(frozen=True)
class Across(Result):
    """Largest over smallest speedup of a task's kernels on several devices (paper Sec. 4: median 2.15, worst 21.4).

    Attributes:
        policy: the policy.
        devices: their names.
        tasks: number of tasks that are solved and timed on all devices.
        median: of the ratios.
        worst: the largest ratio.
        worst_task: the task that has it.
        mixed: tasks that are faster than eager on one device and slower on another.
        geometric_means: of the speedups over these tasks, by device.
    """

    policy: str
    devices: tuple[str, ...]
    tasks: int
    median: float
    worst: float
    worst_task: str
    mixed: int
    geometric_means: Mapping[str, float]


def across(study: Study) -> list[Across]:
    """Return a comparison for each policy (same spec, same timed sizes) that was timed on several devices."""
    found: dict[tuple[str, str], dict[str, PolicyStudy]] = {}
    for p in study.policies:
        if p.timed:
            found.setdefault((p.spec or p.name, p.sizes), {}).setdefault(str(p.manifest.get("device")), p)
    made = []
    for (spec, _), by_device in found.items():
        logs = {device: _logs(p) for device, p in by_device.items()}
        tasks = sorted(set.intersection(*map(set, logs.values()))) if len(logs) > 1 else []
        if not tasks:
            continue
        ratios = {t: math.exp(max(own[t] for own in logs.values()) - min(own[t] for own in logs.values())) for t in tasks}
        worst = max(tasks, key=lambda t: ratios[t])
        mixed = sum(min(own[t] for own in logs.values()) < 0 < max(own[t] for own in logs.values()) for t in tasks)
        means = {device: math.exp(statistics.fmean(own[t] for t in tasks)) for device, own in logs.items()}
        made.append(Across(spec, tuple(logs), len(tasks), statistics.median(ratios.values()), ratios[worst], worst, mixed, means))
    return made


def _logs(p: PolicyStudy) -> dict[str, float]:
    """Return the log-speedup of each task, the mean over its correct answers."""
    found: dict[str, list[float]] = {}
    for r in p.judged:
        if r.correct and r.speedup:
            found.setdefault(r.task, []).append(math.log(r.speedup))
    return {task: statistics.fmean(logs) for task, logs in found.items()}
