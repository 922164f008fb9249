"""Grade the same sources on the CPU tier and on the GPU only, and list every verdict that differs.

    python benchmarks/tier_parity.py OUT.json [--replays FOLDER] [--shard K/N]

The GPU grading leaves out its evidence from the CPU tier, so that the two verdicts are independent. Sources: the experts, experts
with planted faults, the zoo, and replays of declared tasks.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
sys.path.insert(0, str(ROOT / "tests/integration"))

import torch
from test_sanitizer_findings import FAULTS

from kbx_env import jsonl
from kbx_env.grading import pipeline
from kbx_env.grading.grader import Grader
from kbx_env.spec.catalog import expert_source, task_ids


def sources(replays: Path | None) -> Iterator[tuple[str, str, bytes]]:
    """Yield name, task and source of everything to be graded."""
    known = set(task_ids())
    for task in task_ids():
        yield f"expert {task}", task, (expert_source(task) or "").encode()
    for k, (task, old, new, _) in enumerate(FAULTS):
        yield f"fault {k} {task}", task, (expert_source(task) or "").replace(old, new).encode()
    for path in sorted((ROOT / "tests/zoo").glob("*/*.py")):
        task = path.read_text().splitlines()[0].removeprefix("# task:").strip()
        yield f"{path.parent.name} {path.stem}", task, path.read_bytes()
    for path in sorted(replays.glob("*.jsonl")) if replays else []:
        for k, row in enumerate(jsonl.read(path)):
            if row.get("task") in known:
                yield f"replay {path.stem} {k}", row["task"], row["predict"].encode()


def main() -> int:
    """Grade, compare and write."""
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("out", type=Path)
    ap.add_argument("--replays", type=Path)
    ap.add_argument("--shard", default="0/1")
    a = ap.parse_args()
    shard, of = map(int, a.shard.split("/"))
    rows = []
    stages = pipeline.STAGES
    unproven = tuple(s for s in stages if not isinstance(s, pipeline.ProveOnCpu))
    with Grader() as grader:
        for k, (name, task, source) in enumerate(sources(a.replays)):
            if k % of != shard:
                continue
            start = time.monotonic()
            pipeline.STAGES = stages
            cpu = grader.grade(task, source, backend="cpu", targets=(), wall=10)
            pipeline.STAGES = unproven
            gpu = grader.grade(task, source, backend="cuda", targets=(), timing=False, wall=10)
            rows.append({
                "name": name, "cpu": str(cpu.verdict), "cuda": str(gpu.verdict), "cpu_message": cpu.message[:200],
                "cuda_message": gpu.message[:200], "seconds": round(time.monotonic() - start, 2),
                "findings": sorted({f.kind for f in cpu.evidence.findings}) if cpu.evidence else [],
            })  # fmt: skip
            same = "same" if cpu.verdict == gpu.verdict else "DIFFERS"
            print(f"{same:8} {name:50} {cpu.verdict:14} {gpu.verdict:14} {rows[-1]['findings']}", flush=True)
    equal = sum(r["cpu"] == r["cuda"] for r in rows)
    print(f"{equal} of {len(rows)} verdicts equal")
    device = {"device": torch.cuda.get_device_name(0), "torch": torch.__version__}
    a.out.write_text(json.dumps({**device, "rows": rows}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
