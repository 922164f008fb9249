"""Fit the constants of the cost model to measured points, and report how well it ranks them.

Usage:
    python benchmarks/fit_cost.py POINTS.json [--device h200] [--write] [--worst 15]
    python benchmarks/fit_cost.py POINTS.json --synthetic       checks the fit on made-up timings

POINTS.json comes from ``cost_points.py --extract``. For held-out numbers each task is
estimated with constants that were fitted to the other tasks.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
from scipy.optimize import least_squares
from scipy.stats import spearmanr

from kbx_env.backends.cost import Constants, Device, LaunchFacts, estimate_us, load
from kbx_env.backends.cost.devices import path
from kbx_env.errors import UsageError

#: Bounds that keep every constant what its name says.
BOUNDS = {
    "launch_us": (0.5, 20.0),
    "gap_us": (0.2, 10.0),
    "program_us": (0.02, 5.0),
    "load_us": (0.1, 5.0),
    "sync_us": (0.005, 2.0),
    "issue_cycles": (0.25, 32.0),
    "dram_share": (0.4, 1.0),
    "l2_gbs": (1000.0, 30000.0),
    "tensor_share": (0.1, 1.0),
    "atomics_per_us": (20.0, 200000.0),
}
#: The wanted rank correlations: over all points, and the median over tasks within each.
OVERALL, WITHIN = 0.85, 0.7


@dataclass
class Sample:
    """A measured point with its facts."""

    name: str
    task: str
    measured_us: float
    facts: list[LaunchFacts]

    @property
    def size(self) -> str:
        """Task and problem size; points that differ in knobs only have the same."""
        return self.name.rsplit("/", 1)[0]


def read(file: Path, device: Device, synthetic: bool) -> tuple[list[Sample], dict[str, Any]]:
    """Read the points that have facts and a timing.

    Args:
        file: the JSON file.
        device: the device's constants.
        synthetic: replace timings by made-up ones.

    Returns:
        The points, and the facts about the device in the file.
    """
    data = json.loads(file.read_text())
    rng = np.random.default_rng(0)
    out = []
    for e in data["points"]:
        if "facts" not in e or not synthetic and "measured_us" not in e:
            continue
        facts = [LaunchFacts.from_dict(f) for f in e["facts"]]
        try:
            us = estimate_us(facts, device).estimated_us
        except UsageError as wrong:
            print("left out:", e["name"], wrong)
            continue
        us = us * float(np.exp(rng.normal(0, 0.2))) if synthetic else e["measured_us"]
        out.append(Sample(e["name"], e["task"], us, facts))
    return out, data["device"]


def errors(samples: Sequence[Sample], device: Device) -> np.ndarray[Any, Any]:
    """Return log(estimated / measured) of each point."""
    return np.array([math.log(estimate_us(s.facts, device).estimated_us / s.measured_us) for s in samples])


def fit(samples: Sequence[Sample], device: Device) -> Device:
    """Return the device with the constants that fit the points best."""
    # Every task has the same weight, regardless of its number of points.
    sizes: defaultdict[str, int] = defaultdict(int)
    for s in samples:
        sizes[s.task] += 1
    weight = np.array([1 / math.sqrt(sizes[s.task]) for s in samples])
    keys = list(BOUNDS)
    low, high = (np.log([BOUNDS[k][i] for k in keys]) for i in (0, 1))

    def made(x: np.ndarray[Any, Any]) -> Device:
        return device.with_constants(**dict(zip(keys, np.exp(x).tolist(), strict=True)))

    start = np.clip(np.log([asdict(Constants())[k] for k in keys]), low + 1e-3, high - 1e-3)
    # A soft loss: a point that the model cannot explain must not distort the constants.
    best = least_squares(
        lambda x: weight * errors(samples, made(x)), start, bounds=(low, high), loss="soft_l1", f_scale=0.1, max_nfev=40
    )
    return made(best.x)


def _rank(pairs: Sequence[tuple[float, float]]) -> float:
    a, b = zip(*pairs, strict=True)
    return float(spearmanr(a, b).statistic)


def _groups(
    samples: Sequence[Sample], estimates: Sequence[float], key: Callable[[Sample], str]
) -> dict[str, list[tuple[float, float]]]:
    out: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
    for s, e in zip(samples, estimates, strict=True):
        out[key(s)].append((s.measured_us, e))
    return dict(out)


def judge(samples: Sequence[Sample], estimates: Sequence[float]) -> dict[str, Any]:
    """Return rank correlations and errors of estimates."""
    by_task = {k: _rank(v) for k, v in _groups(samples, estimates, lambda s: s.task).items() if len(v) > 3}
    # Groups whose times differ by less than a factor of 1.3 are left out: they have no order to find.
    by_size = {
        k: _rank(v)
        for k, v in _groups(samples, estimates, lambda s: s.size).items()
        if len(v) > 3 and max(m for m, _ in v) > 1.3 * min(m for m, _ in v) and len({e for _, e in v}) > 1
    }
    off = [abs(math.log(e / s.measured_us)) for s, e in zip(samples, estimates, strict=True)]
    return {
        "points": len(samples),
        "tasks": len(by_task),
        "spearman": round(_rank([(s.measured_us, e) for s, e in zip(samples, estimates, strict=True)]), 4),
        "spearman_within_task_median": round(statistics.median(by_task.values()), 4),
        "spearman_within_task": {k: round(v, 3) for k, v in sorted(by_task.items(), key=lambda p: p[1])},
        "spearman_knobs_median": round(statistics.median(by_size.values()), 4) if by_size else None,
        "median_error_factor": round(math.exp(statistics.median(off)), 3),
        "p90_error_factor": round(math.exp(sorted(off)[int(0.9 * len(off))]), 3),
    }


def show(title: str, result: dict[str, Any]) -> None:
    """Print a result of ``judge`` under a title."""
    print(f"{title}: " + ", ".join(f"{k} {v}" for k, v in result.items() if k != "spearman_within_task"))
    print("  within task: " + ", ".join(f"{k} {v}" for k, v in result["spearman_within_task"].items()))


def main() -> int:
    """Fit, validate and print."""
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("points", type=Path)
    ap.add_argument("--device", default="h200")
    ap.add_argument("--write", action="store_true", help="keep the constants in the device's data file")
    ap.add_argument("--worst", type=int, default=15, help="points to print that are estimated worst")
    ap.add_argument("--synthetic", action="store_true", help="time by the model with 20 %% noise, to check the fit")
    a = ap.parse_args()
    device, start = load(a.device), time.monotonic()
    samples, about = read(a.points, device, a.synthetic)
    if a.synthetic and a.write:
        ap.error("made-up timings are not written")
    show("before the fit", judge(samples, [estimate_us(s.facts, device).estimated_us for s in samples]))
    fitted = fit(samples, device)
    estimates = [estimate_us(s.facts, fitted).estimated_us for s in samples]
    show("fitted", inside := judge(samples, estimates))
    print("constants:", {k: float(f"{v:.4g}") for k, v in asdict(fitted.constants).items()})
    held: dict[str, float] = {}
    for task in sorted({s.task for s in samples}):
        other = fit([s for s in samples if s.task != task], device)
        held |= {s.name: estimate_us(s.facts, other).estimated_us for s in samples if s.task == task}
    show("held out", outside := judge(samples, [held[s.name] for s in samples]))
    worst = sorted(zip(samples, estimates, strict=True), key=lambda p: -abs(math.log(p[1] / p[0].measured_us)))
    for s, e in worst[: a.worst]:
        print(
            f"  {s.name}: measured {s.measured_us:.1f}, estimated {e:.1f}, by {estimate_us(s.facts, fitted).bound_by}"
        )
    good = outside["spearman"] >= OVERALL and outside["spearman_within_task_median"] >= WITHIN
    print(f"held out: {'reaches' if good else 'MISSES'} {OVERALL} overall and {WITHIN} within a task")
    print(f"{time.monotonic() - start:.0f} s")
    if a.write:
        data = json.loads(path(a.device).read_text())
        data["constants"] = {k: float(f"{v:.4g}") for k, v in asdict(fitted.constants).items()}
        data["sources"]["constants"] = f"fitted to {len(samples)} points measured on {about.get('name')}"
        data["fit"] = {"measured_on": about, "fitted": inside, "held_out": outside}
        path(a.device).write_text(json.dumps(data, indent=1) + "\n")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
