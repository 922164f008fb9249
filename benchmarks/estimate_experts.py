"""Compare estimated with measured times of the experts, which are not among the points of the fit.

    python benchmarks/estimate_experts.py MEASUREMENTS.json [--device h200]

MEASUREMENTS.json comes from ``measure_gpu.py`` on that device. Prints a table and the rank correlation.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
from scipy.stats import spearmanr

from kbx_env.grading.grader import Grader
from kbx_env.spec.catalog import expert_source, task_ids


def main() -> int:
    """Estimate on this machine and compare with the measurements."""
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("measured", type=Path)
    ap.add_argument("--device", default="h200")
    a = ap.parse_args()
    rows = {r["task"]: r for r in json.loads(a.measured.read_text())["experts"] if r.get("timing")}
    pairs = []
    print("| task | case | measured (us) | estimated (us) | ratio |\n|---|---|---|---|---|")
    with Grader() as grader:
        for task in task_ids():
            found = grader.grade(task, expert_source(task) or "", backend="cpu", targets=(), estimate=a.device).estimate
            timed = {c["case"]: c["candidate_us"] for c in rows[task]["timing"]["cases"]} if task in rows else {}
            for c in found.cases if found else ():
                if c.case in timed:
                    pairs.append((timed[c.case], c.estimated_us))
                    us, guess = pairs[-1]
                    print(f"| {task} | {c.case} | {us:.1f} | {guess:.1f} | {guess / us:.2f} |")
    measured, estimated = np.array(pairs).T
    error = np.exp(np.abs(np.log(estimated / measured)))
    rank = float(spearmanr(measured, estimated).statistic)
    print(f"\n{len(pairs)} cases: Spearman {rank:.3f}, median factor {np.median(error):.2f}, largest {error.max():.2f}")
    return 0 if math.isfinite(rank) else 1


if __name__ == "__main__":
    sys.exit(main())
