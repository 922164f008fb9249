"""Measure the grader on one GPU: experts with speedups, kernels against themselves, baselines without reward, the zoo.

    python benchmarks/measure_gpu.py OUT_FOLDER [--quick]

Writes measurements.json with device, driver and versions. Figures quoted in docs/measurements come from here.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import triton
from kbx_env.baselines.policy import make_policy

from kbx_env.grading import inputs
from kbx_env.grading.grader import Grader
from kbx_env.grading.runtime.session import RunnerSession
from kbx_env.grading.timing import roofline
from kbx_env.grading.timing.contestants import SLOTS, RunnerContestant
from kbx_env.grading.timing.paired import pair
from kbx_env.spec.catalog import expert_source, load_task, load_tasks, task_ids

ZOO = Path(__file__).resolve().parent.parent / "tests/zoo"


def self_against_self(grader: Grader, task_id: str, case_index: int, repeats: int) -> list[dict]:
    """Time a kernel against itself in two new runners: the interval of the ratio must contain 1.

    Args:
        grader: the grader.
        task_id: the task whose expert is timed.
        case_index: number of the timed case.
        repeats: number of comparisons.

    Returns:
        One row for each comparison.
    """
    task = load_task(task_id)
    case = task.timed[case_index]
    rows = []
    for repeat in range(repeats):
        secret = b"aa-%d" % repeat
        sides = []
        for _ in range(2):
            session = RunnerSession(grader.zygote(), task, "cuda", secret, "eval", 60)
            session.load((expert_source(task_id) or "").encode())
            sides.append(RunnerContestant(session, case))
        slots = [
            inputs.draw(task, case, inputs.case_seed(secret, task.id, "time", case_index, k))
            for k in range(SLOTS)
        ]
        for side in sides:
            side.prepare(slots)
        paired = pair(*sides)
        for side in sides:
            side.session.__exit__()
        rows.append({
            "task": task_id, "case": case.label(), "us": paired.eager_us, "ratio": math.exp(paired.log_ratio),
            "low": math.exp(paired.low), "high": math.exp(paired.high), "pairs": paired.pairs,
            "holds": paired.low <= 0 <= paired.high,
        })  # fmt: skip
    return rows


def graded(grader: Grader, label: str, task_id: str, source: str | None, **options: object) -> dict:
    """Grade a source, print the result and return it as a row.

    Args:
        grader: the grader.
        label: name of the source.
        task_id: the task.
        source: the source; ``None`` counts as empty.
        **options: options of ``grade``.

    Returns:
        The row.
    """
    start = time.perf_counter()
    try:
        row = grader.grade(task_id, source or "", backend="cuda", **options).to_dict()  # type: ignore[arg-type]
    except Exception:
        row = {"verdict": "exception", "correct": False, "message": traceback.format_exc()[-1500:], "timing": None}
    row |= {"label": label, "task": task_id, "wall_seconds": round(time.perf_counter() - start, 3)}
    t = row["timing"]
    shown = f"{t['speedup']:.3f} [{t['low']:.3f}, {t['high']:.3f}]" if t else "-"
    print(
        f"{label:28} {task_id:34} {row['verdict']:13} {row['wall_seconds']:6.2f} s {shown} {str(row['message'])[:200]}",
        flush=True,
    )
    return row


def main() -> None:
    """Run all parts; write after every part, so that an interrupted run keeps its results so far."""
    p = argparse.ArgumentParser()
    p.add_argument("out", type=Path)
    p.add_argument("--quick", action="store_true")
    p.add_argument("--tasks", default="*", help="glob of the experts to time")
    p.add_argument("--aa", type=int, default=8, help="repeats of a kernel against itself")
    p.add_argument("--parts", default="experts,aa,baselines,zoo")
    a = p.parse_args()
    a.out.mkdir(parents=True, exist_ok=True)
    ceilings = roofline.measure_ceilings("cuda")
    result: dict = {
        "device": torch.cuda.get_device_name(0), "torch": torch.__version__, "triton": triton.__version__,
        "python": sys.version.split()[0], "date": time.strftime("%Y-%m-%d"), "cuda": torch.version.cuda,
        "copy_bytes_per_second": ceilings.copy, "fp16_flops_per_second": ceilings.product,
    }  # fmt: skip
    print(result, flush=True)
    parts = {"experts": experts, "baselines": baselines, "zoo": zoo, "aa": self_comparisons}
    with Grader() as grader:
        for name, run in parts.items():
            if name in a.parts.split(","):
                for rows in run(grader, a):
                    result[name] = rows
                    (a.out / "measurements.json").write_text(json.dumps(result, indent=1))


def experts(grader: Grader, a: argparse.Namespace) -> Iterator[list]:
    """Grade the experts; yield the rows so far after each one."""
    rows: list = []
    for t in (t.id for t in load_tasks(pattern=a.tasks)):
        rows.append(graded(grader, "expert", t, expert_source(t), targets=("sm_90",), timing=not a.quick))
        yield rows


def baselines(grader: Grader, a: argparse.Namespace) -> Iterator[list]:
    """Grade the baselines on all tasks; yield all rows."""
    rows = []
    for name in ("eager", "zeros"):
        policy = make_policy(name)
        for t in task_ids():
            rows.append(graded(grader, name, t, policy.act({"task": t}), targets=(), timing=False))
    yield rows


def zoo(grader: Grader, a: argparse.Namespace) -> Iterator[list]:
    """Grade the zoo's attacks and honest oddities; yield all rows."""
    rows = []
    for kind in ("exploits", "honest"):
        for path in sorted((ZOO / kind).glob("*.py")):
            source = path.read_text()
            task_id = source.splitlines()[0].removeprefix("# task:").strip()
            rows.append(graded(grader, f"{kind}/{path.stem}", task_id, source, targets=(), timing=False, wall=10.0))
    yield rows


def self_comparisons(grader: Grader, a: argparse.Namespace) -> Iterator[list]:
    """Time some kernels against themselves; yield the rows so far after each one."""
    rows: list = []
    for task_id, case in (("activation/gelu_fp16", 0), ("activation/gelu_fp16", 2), ("math/softmax", 1),
                          ("matrixmultiply/matmul_bf16", 1)):  # fmt: skip
        try:
            rows += self_against_self(grader, task_id, case, a.aa)
        except Exception:
            rows.append({"task": task_id, "error": traceback.format_exc()[-1500:]})
        print(*rows[-a.aa :], sep="\n", flush=True)
        yield rows


if __name__ == "__main__":
    main()
