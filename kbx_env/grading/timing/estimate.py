"""Cost-model estimates of the timing cases, on a machine without the GPU."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from kbx_env.backends import cost
from kbx_env.grading import compulsory_work, inputs
from kbx_env.grading.runtime.engine_client import EngineError
from kbx_env.grading.runtime.session import RunnerSession
from kbx_env.grading.runtime.untrusted import GradingAborted, readable
from kbx_env.grading.sizes import timed
from kbx_env.outcome import CaseEstimate, Estimate
from kbx_env.protocol import wire
from kbx_env.spec.task import Case, Task, shape_of

SECONDS = 20.0
"""Time limit of one case; counting takes fractions of a second."""


def _bytes(views: Any) -> dict[int, int]:
    """Return bytes by storage, of views whose items 0, 1 and 3 are storage, dtype and shape."""
    return {v[0]: math.prod(v[3]) * getattr(torch, v[1]).itemsize for v in views}


def floor_us(device: cost.Device, moved: int, operations: float) -> float:
    """Return the shortest time by the data sheet's peaks: all bytes from DRAM, all operations at the fastest tensor
    core rate.

    Args:
        device: its data sheet.
        moved: bytes.
        operations: floating-point or integer operations.

    Returns:
        Microseconds.
    """
    peak = max(device.tensor_tflops.values()) * 1e6
    return max(moved / (device.dram_gbs * 1e3), operations / peak)


def blank_sizes(task: Task, case: Case) -> dict[str, dict[str, Any]]:
    """Return the wire form of a case's tensors without values: row-major, by parameter."""
    sizes = {}
    for name, t in task.takes.items():
        if name in case.args or (t.optional and name not in case.given):
            continue
        shape = list(shape_of(t, case.axes))
        stride = [math.prod(shape[k + 1 :]) for k in range(len(shape))]
        dtype = case.dtypes.get(name, t.dtype)
        sizes[name] = {"k": "blank", "dtype": dtype, "shape": shape, "stride": stride, "shift": 0}
    return sizes


def _estimate_case(
    task: Task, session: RunnerSession, case: Case, device: str, tiles: Mapping[str, torch.Tensor]
) -> CaseEstimate:  # fmt: skip
    """Estimate one timing case.

    Args:
        task: the task.
        session: with the loaded submission.
        case: the timing case.
        device: name of a data sheet.
        tiles: values by tensor, of a smaller case; the engine repeats them to the size of the timing case.

    Returns:
        The estimate.
    """
    assert session.engine is not None
    sizes = blank_sizes(task, case)
    args: dict[str, Any] = dict(sizes)
    for name, value in case.args.items():
        if name not in args and name != "out":
            args[name] = value
    header = session.header(args) | {"op": "call", "mode": "run", "seconds": SECONDS}
    session.budget.restart(SECONDS)
    message, _ = session.ask(header)
    with readable():
        found, message = session.engine.estimate(device, tiles, sizes, message, lambda a: session.ask(a)[0], SECONDS)
        results = _bytes(c["view"] for c in message["outputs"] if c["k"] == "view")
        after = _bytes(message["after"].values())
    written = sum(after.get(dict(message["inputs"]).get(n, -1), 0) for n in task.written(case.args))
    moved = sum(after.values()) + sum(n for base, n in results.items() if base not in after) + written
    least = floor_us(cost.load(device), moved, compulsory_work.flops(task, case))
    return CaseEstimate(
        case.label(), float(found["estimated_us"]), least, int(found["launches"]), str(found["bound_by"])
    )


def estimate(task: Task, session: RunnerSession, device: str, sizes: str = "published") -> Estimate | None:
    """Estimate every timing case.

    Args:
        task: the task.
        session: with the loaded submission.
        device: name of a data sheet.
        sizes: which timing cases, one of ``kbx_env.options.SIZES``.

    Returns:
        The estimate; ``None`` where a case cannot be estimated, for example because the kernel reads a value back.
    """
    largest = max((c for c in task.cases if not c.out), key=lambda c: sum(compulsory_work.numels(task, c).values()))
    drawn = inputs.draw(task, largest, inputs.case_seed(session.secret, task.id, "estimate", 0, 0))
    tiles = {k: v for k, v in drawn.items() if isinstance(v, torch.Tensor) and v.dtype in wire.NAMES}
    rows = []
    try:
        for case in timed(task, sizes):
            rows.append(_estimate_case(task, session, case, device, tiles))
    except (GradingAborted, EngineError):
        return None
    n = len(rows)
    share = math.exp(sum(math.log(min(1.0, max(r.floor_us, 1e-6) / r.estimated_us)) for r in rows) / n)
    us = math.exp(sum(math.log(r.estimated_us) for r in rows) / n)
    return Estimate(device, us, share, tuple(rows), cost.load(device).sources.get("constants", ""))
