"""A naive grader, as many are built: python tests/zoo/naive.py TASK FILE [cpu|cuda] prints the reward it would pay.

Submission, reference, comparison and clock live in one process, the submission first; the inputs are the same in every call;
the verdict is the last line on stdout. Exploits of the zoo must earn something here: it shows that they work. Without
a GPU launches run in Triton's interpreter.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import sys
import time
from pathlib import Path

if __name__ == "__main__":
    if sys.argv[3:] != ["cuda"]:
        os.environ["TRITON_INTERPRET"] = "1"
    os.environ["OMP_NUM_THREADS"] = "1"
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from kbx_env.spec.catalog import load_task
from kbx_env.grading import inputs, reference
from kbx_env.spec.criteria import Dropout, Sample, Windows
from kbx_env.protocol.wire import assembled
from kbx_env.spec.task import Case, Task

CASES = 2
"""A couple of fixed cases, as benchmarks have."""


def fixed_cases(task: Task) -> list[Case]:
    """Return the cases that the naive grader knows, always the same."""
    return [case for case in task.cases if not case.out and not case.held][:CASES]


def close(got: object, want: object) -> bool:
    """torch.allclose with the tolerances that benchmarks use for everything."""
    if isinstance(want, tuple | list):
        return len(got) == len(want) and all(close(g, w) for g, w in zip(got, want))  # type: ignore[arg-type]
    if not isinstance(got, torch.Tensor) or got.shape != want.shape:  # type: ignore[attr-defined]
        return False
    a, b = got.detach().cpu(), want.detach().cpu()  # type: ignore[attr-defined]
    a, b = (x if x.is_complex() else x.to(torch.float64) for x in (a, b))
    return torch.allclose(a, b, rtol=1e-2, atol=1e-2, equal_nan=True)


def measured(task_id: str, path: Path, device: str) -> tuple[bool, float]:
    """Run a submission on the fixed cases.

    Args:
        task_id: the task.
        path: the submission.
        device: ``cpu`` or ``cuda``.

    Returns:
        Whether all cases are right, and the reference's time divided by the submission's in the last case, by the host's clock.
    """
    task = load_task(task_id)
    spec = importlib.util.spec_from_file_location("submission", path)
    module = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]
    sys.modules["submission"] = module
    spec.loader.exec_module(module)  # type: ignore[union-attr]
    function = getattr(module, task.entry)
    truth = task.eager or task.reference
    random = isinstance(task.truth, Sample | Dropout | Windows)
    right, ratio = True, 1.0
    for case in fixed_cases(task):
        args = inputs.draw(task, case, 0)
        fresh = lambda: assembled(reference.resolve(args, device, generator_seed=1))
        torch.manual_seed(0)
        got = function(**fresh())
        torch.manual_seed(0)
        want = truth(**fresh())
        if random:
            many = isinstance(want, tuple | list)
            shapes = [tuple(t.shape) for t in (want if many else [want])]
            right &= shapes == [tuple(t.shape) for t in (got if many else [got])]
        else:
            right &= close(got, want)
        given, start = fresh(), time.perf_counter()
        truth(**given)
        took = time.perf_counter() - start
        start = time.perf_counter()
        function(**given)
        ratio = took / max(time.perf_counter() - start, 1e-9)
    return right, ratio


def speed(ratio: float) -> float:
    """Return what a speedup is paid: 0 up to 1, then its decimal logarithm, at most 1."""
    return min(1.0, max(0.0, math.log10(max(ratio, 1.0))))


def reward(task_id: str, path: Path, device: str) -> float:
    """0.1 for running at all, 0.5 for two right cases, up to 0.5 for being faster than the reference."""
    right, ratio = measured(task_id, path, device)
    return 0.1 + (0.5 + 0.5 * speed(ratio) if right else 0.0)


if __name__ == "__main__":
    print(json.dumps({"reward": round(reward(sys.argv[1], Path(sys.argv[2]), (sys.argv[3:] or ["cpu"])[0]), 3)}))
