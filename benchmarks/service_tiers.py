"""Two tiers as a schedule, simulated: gradings a second and GPU seconds a grading, with and without CPU screening.

    python benchmarks/service_tiers.py --correct 0.1 0.6 --screeners 16

Three schedules of the same workload on one GPU machine, by ``eval/simulate.py``:

- ``gpu only``: no CPU tier at all (the layer ``proof`` left out); wrong kernels are compiled and judged on the GPU;
- ``one machine``: the GPU machine's own workers make the proof first, as every grading on CUDA does;
- ``two tiers``: ``kbx serve --screen-url``: other cores make the proofs, and only survivors take a worker of the GPU.

The stage times are means of recorded runs on an H200 (docs/measurements/2026-11-25-h200-timing.md, run a): a correct kernel
has 6.8 s of a core, 1.9 s of the shared GPU and 0.68 s of the GPU alone. The proof is taken as a third of the core seconds,
which is its share of proof and compilation in docs/measurements/2026-11-22-h200-x2.md. It is an assumption for a loaded machine.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from kbx_env.eval.simulate import Job, Shape, play

import kbx_env  # noqa: F401

CORE, SHARED, ALONE = 6.8, 1.9, 0.68
"""Seconds of a correct kernel: 17.2 s from begin to end, less 7.8 s of waiting, less the GPU; shared; alone."""
PROOF = CORE / 3
"""Seconds of a core for the proof on the CPU tier."""


def schedules(correct: float, screeners: int, shape: Shape, count: int) -> list[dict[str, float | str]]:
    """Simulate the three schedules.

    Args:
        correct: share of correct kernels.
        screeners: workers of the other machine.
        shape: of the GPU machine.
        count: requests.

    Returns:
        A row for each schedule.
    """
    rng = random.Random(0)
    right = [rng.random() < correct for _ in range(count)]
    survivor = Job(CORE - PROOF, SHARED, ALONE)
    jobs = {
        "gpu only": [survivor if r else Job(CORE - PROOF, SHARED) for r in right],
        "one machine": [Job(CORE, SHARED, ALONE) if r else Job(PROOF) for r in right],
        "two tiers": [survivor for r in right if r],
    }
    rows: list[dict[str, float | str]] = []
    for name, todo in jobs.items():
        seconds = play(todo, shape).seconds
        if name == "two tiers":  # screening runs beside it
            seconds = max(seconds, count * PROOF / screeners)
        held = sum(j.shared + j.alone for j in todo)
        alone = sum(j.alone for j in todo)
        rows.append({
            "correct": correct, "schedule": name, "gradings_per_second": round(count / seconds, 2),
            "gpu_seconds_per_grading": round(held / count, 2), "of_them_alone": round(alone / count, 3),
            "gpu_core_seconds_per_grading": round(sum(j.core for j in todo) / count, 2),
        })  # fmt: skip
    return rows


def main() -> None:
    """Print a row for each schedule and share, as JSON lines."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--correct", type=float, nargs="+", default=[0.1, 0.6], help="shares of correct kernels")
    p.add_argument("--screeners", type=int, default=16, help="workers that screen, on other cores")
    p.add_argument("--workers", type=int, default=14, help="workers of the GPU machine")
    p.add_argument("--cores", type=int, default=16, help="cores of the GPU machine")
    p.add_argument("--count", type=int, default=2000)
    a = p.parse_args()
    for correct in a.correct:
        for row in schedules(correct, a.screeners, Shape(1, a.workers, a.cores), a.count):
            print(json.dumps(row))


if __name__ == "__main__":
    main()
