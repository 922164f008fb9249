"""Measure how near correct kernels come to their tolerances: the largest error over many draws of each case (CPU backend).

    python benchmarks/error_margins.py [--tasks GLOB] [--draws N] [--elements N] [--json FILE]

The kernels of the experts run in the sandbox, as in a grading. A case with batch axes gets one more batch axis, whose
slices are judged one by one as the case itself, so that thousands of draws cost a few launches. Derived cases are drawn
anew for each launch. The error of a draw is in units of what the judge allows: above 1 a correct kernel was refused.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch

from kbx_env.grading import derived_cases, reference
from kbx_env.grading.grader import Grader
from kbx_env.grading.judge import Answer, close, invariant
from kbx_env.grading.judge.structure import pairs
from kbx_env.grading.runtime.session import CallResult, RunnerSession
from kbx_env.spec.catalog import expert_source, load_task, task_ids
from kbx_env.spec.criteria import Close, Invariant
from kbx_env.spec.task import Case, Literal, Task

NEAR = 0.5
"""Errors above this share of the plain tolerance are compared with the measured conditioning as well."""
DERIVED = 8
"""Different derived cases of each family."""
WALL = 1e6
"""Seconds that the runner may take."""


def batch_axis(task: Task, case: Case) -> str | None:
    """Return the name of the axes to which another batch axis can be added; ``None`` where a tensor lacks them."""
    names = [n for n in case.axes if n.startswith("*") and n != "*k"]
    if len(names) != 1 or not all(t.axes.split()[0] == names[0] for t in task.takes.values()):
        return None
    return names[0]


def enlarged(task: Task, case: Case, draws: int, elements: int) -> tuple[Case, int]:
    """Return a case with one more batch axis, and its length; the case itself and 0 where that is not possible."""
    name = batch_axis(task, case)
    if name is None or any(x not in ("transposed", "strided") for x in case.layouts.values()):
        return case, 0
    count = max(1, min(draws, elements // max(1, case.elements())))
    return replace(case, axes={**case.axes, name: (count, *case.axes[name])}), count


def sliced(call: CallResult, i: int) -> tuple[dict[str, Any], Answer]:
    """Return arguments and results of one draw of a call with another batch axis."""
    args = {k: v[i] if isinstance(v, torch.Tensor) else v for k, v in call.args.items()}
    outputs = tuple(o[i] if o.dim() > 1 or o.numel() else o for o in call.answer.outputs)
    return args, replace(call.answer, outputs=outputs)


def closeness(task: Task, case: Case, args: Mapping[str, Any], answer: Answer) -> float:
    """Return the largest error of an answer in units of what ``judge/close.py`` allows."""
    truth = task.truth
    assert isinstance(truth, Close)
    expected = reference.expect(task, case, args)
    ratio, moved = [0.0], list[torch.Tensor]()
    perturbations = reference.Perturbations(task, case, args, expected)
    for draws in (0, reference.DRAWS, close.MANY):
        if draws:
            outputs, written = perturbations.root_mean_square(draws)
            moved = [*outputs, *written.values()]
        ratio = [0.0]
        for i, (_, got, exact, native, size) in enumerate(pairs(expected, answer)):
            if got.dtype.is_floating_point and got.numel():
                if draws and truth.rival is not None:
                    native = close._farther(exact, native, reference.by_rival(task, case, args, truth.rival)[i])
                grown = close.growth(truth, task, case, expected)
                extra = close.loosen(truth, moved[i], exact.to(torch.float64), got.dtype, grown, size) if moved else 0.0
                ratio.append(float(close.misses(truth, got, exact, native, extra, size)[0].max()))
        if max(ratio) <= (1.0 if draws else NEAR):
            break
    return max(ratio)


def brokenness(task: Task, case: Case, args: Mapping[str, Any], answer: Answer) -> float:
    """Return the largest error of a factorisation in units of what ``judge/invariant.py`` allows."""
    assert isinstance(task.truth, Invariant)
    expected, worst = reference.expect(task, case, args), 0.0
    for error, limit in invariant.errors_and_limits(task.truth, args, expected, answer).values():
        worst = max(worst, error / limit if limit else float(error > 0) * 2)
    return worst


def deterministic(task: Task, case: Case) -> bool:
    """Return whether all draws of a case are equal."""
    return all(isinstance(case.draws.get(n) or t.draw or case.draw, Literal) for n, t in task.takes.items())


def calls(task: Task, session: RunnerSession, case: Case, draws: int, elements: int, first: int) -> Iterator[tuple[Case, Any, Any]]:
    """Yield case, arguments and answer of every draw of a case."""
    big, count = enlarged(task, case, draws, elements)
    left = 1 if deterministic(task, case) else draws
    while left > 0:
        made = session.call(big, first + left, "run")
        for i in range(min(left, count)):
            yield case, *sliced(made, i)
        if not count:
            yield case, made.args, made.answer
        left -= max(1, count)


def measure(task: Task, grader: Grader, draws: int, elements: int) -> list[dict[str, Any]]:
    """Return a row for each case: the number of draws, the largest error, and how many were refused."""
    judged = closeness if isinstance(task.truth, Close) else brokenness
    cases: list[tuple[Case, int]] = [(c, draws) for c in task.cases if c.elements() and 0 not in _sizes(c)]
    for _ in range(DERIVED):
        cases += [(c, -(-draws // DERIVED)) for c in derived_cases.derive(task, secrets.token_bytes(32), "eval")]
    rows = []
    with RunnerSession(grader.zygote(), task, "cpu", secrets.token_bytes(32), "eval", WALL) as session:
        session.load((expert_source(task.id) or "").encode())
        for number, (case, count) in enumerate(cases):
            errors = [judged(task, *x) for x in calls(task, session, case, count, elements, number << 24)]
            rows.append({
                "case": case.label(), "draws": len(errors), "largest": max(errors, default=0.0),
                "refused": sum(e > 1 for e in errors), "near": sum(e > NEAR for e in errors),
            })  # fmt: skip
    return rows


def _sizes(case: Case) -> list[int]:
    return [n for size in case.axes.values() for n in (size if isinstance(size, tuple) else (size,))]


def main() -> None:
    """Run the command; prints a row for each task."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", default="linearalgebra/*")
    parser.add_argument("--draws", type=int, default=1000, help="of each case")
    parser.add_argument("--elements", type=int, default=1 << 18, help="product of the axes of one launch")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    found = {}
    print("| task | draws | largest error / allowed | in case | refused | above half | CPU seconds |")
    print("|---|---|---|---|---|---|---|")
    with Grader() as grader:
        for name in task_ids():
            task = load_task(name)
            if not fnmatch(name, options.tasks) or not isinstance(task.truth, Close | Invariant):
                continue
            start = time.process_time()
            rows = found[name] = measure(task, grader, options.draws, options.elements)
            worst = max(rows, key=lambda r: r["largest"])
            cells = [
                name, sum(r["draws"] for r in rows), f"{worst['largest']:.3g}", worst["case"], sum(r["refused"] for r in rows),
                sum(r["near"] for r in rows), f"{time.process_time() - start:.0f}",
            ]  # fmt: skip
            print("| " + " | ".join(map(str, cells)) + " |", flush=True)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
