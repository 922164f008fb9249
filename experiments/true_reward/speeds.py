"""What the naive grader pays each cheat and each honest kernel on a GPU, where its clock is the one that benchmarks use.

    python experiments/true_reward/speeds.py OUT.jsonl [--device cuda] [--repeats 2] [--workers 4]

Runs ``tests/zoo/naive.py`` in a process for each, and writes a line for each: task, family, source, the rewards of the repetitions,
and ``speed``, the median of the speed term from 0 to 1. ``study.py --rewards naive-gpu --speeds OUT.jsonl`` trains on these.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
if __package__ in (None, ""):  # run as a script from a clone
    sys.path.insert(0, str(ROOT))

from experiments.true_reward.cheats import HONEST, RECIPES, cheats, honest, shape_of
from experiments.true_reward.naive_reward import RIGHT, RUNS, SPEED
from kbx_env import jsonl


def read(path: str | Path) -> dict[tuple[str, str], float]:
    """Return the speed terms in a file of this script, by task and ``shape_of`` the source."""
    return {(r["task"], shape_of(r["source"]) or ""): r["speed"] for r in jsonl.read(path)}


def measured(task: str, source: str, device: str) -> float | None:
    """Return the naive reward of a source; ``None`` if it does not run."""
    with tempfile.TemporaryDirectory(prefix="kbx-naive-") as folder:
        path = Path(folder) / "submission.py"
        path.write_text(source)
        command = [sys.executable, str(ROOT / "tests/zoo/naive.py"), task, str(path), device]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))}
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=90, cwd=folder, env=env)
            return float(json.loads(done.stdout.strip().splitlines()[-1])["reward"])
        except (subprocess.TimeoutExpired, ValueError, LookupError, TypeError):
            return None


def row(task: str, family: str, source: str, rewards: Sequence[float | None]) -> dict[str, Any]:
    """Return a line of the file.

    Args:
        task: the task.
        family: the family of the cheat, or ``honest``.
        source: the source.
        rewards: of the repetitions.

    Returns:
        The line; ``speed`` is 0 unless all repetitions are right.
    """
    right = [r for r in rewards if r is not None and r >= RUNS + RIGHT - 1e-9]
    speed = statistics.median((r - RUNS - RIGHT) / SPEED for r in right) if right and len(right) == len(rewards) else 0.0
    return {"task": task, "family": family, "source": source, "rewards": list(rewards), "speed": round(speed, 4)}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; exit status 0 if every source is right every time, 1 if not, 2 without a GPU."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("out", type=Path, metavar="OUT.jsonl")
    p.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    p.add_argument("--repeats", type=int, default=2)
    p.add_argument("--workers", type=int, default=4, help="processes at a time, which disturb each other's clocks")
    a = p.parse_args(argv)
    if a.device == "cuda":
        import torch

        if not torch.cuda.is_available():
            print("speeds.py: torch finds no CUDA device; --device cpu uses Triton's interpreter", file=sys.stderr)
            return 2
    sources = [(t, f, s) for t in RECIPES for f, s in {**cheats(t), HONEST: honest(t)}.items()]
    with ThreadPoolExecutor(a.workers) as threads:
        rewards = list(threads.map(lambda job: measured(job[0], job[2], a.device), sources * a.repeats))
    rows = [row(*one, rewards[k :: len(sources)]) for k, one in enumerate(sources)]
    a.out.parent.mkdir(parents=True, exist_ok=True)
    jsonl.write(a.out, rows)
    for r in rows:
        print(f"{r['task']}, {r['family']}: rewards {r['rewards']}, speed term {r['speed']:.2f}")
    return 0 if all(v is not None and v >= RUNS + RIGHT - 1e-9 for v in rewards) else 1


if __name__ == "__main__":
    sys.exit(main())
