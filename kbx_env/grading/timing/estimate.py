"""Estimates of the timing cases, on a machine that cannot time them."""

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
"""For one case: counting takes fractions of a second."""


def _bytes(views: Any) -> dict[int, int]:
    return {v[0]: math.prod(v[3]) * getattr(torch, v[1]).itemsize for v in views}


def floor_us(device: cost.Device, moved: int, operations: float) -> float:
    """Microseconds that the datasheet's peaks allow: all bytes from DRAM, all operations at the fastest tensor core."""
    peak = max(device.tensor_tflops.values()) * 1e6
    return max(moved / (device.dram_gbs * 1e3), operations / peak)


def _sizes(task: Task, case: Case) -> dict[str, dict[str, Any]]:
    sizes = {}
    for name, t in task.takes.items():
        if name in case.args or (t.optional and name not in case.given):
            continue
        shape = list(shape_of(t, case.axes))
        stride = [math.prod(shape[k + 1 :]) for k in range(len(shape))]
        dtype = case.dtypes.get(name, t.dtype)
        sizes[name] = {"k": "blank", "dtype": dtype, "shape": shape, "stride": stride, "shift": 0}
    return sizes


def _one(task: Task, talk: RunnerSession, case: Case, device: str, tiles: Mapping[str, torch.Tensor]) -> CaseEstimate:
    assert talk.engine is not None
    sizes = _sizes(task, case)
    given: dict[str, Any] = dict(sizes)
    for name, value in case.args.items():
        if name not in given and name != "out":
            given[name] = value
    header = talk.header(given) | {"op": "call", "mode": "run", "seconds": SECONDS}
    talk.left = SECONDS
    message, _ = talk.ask(header)
    with readable():
        found, message = talk.engine.estimate(device, tiles, sizes, message, lambda a: talk.ask(a)[0], SECONDS)
        results = _bytes(c["view"] for c in message["outputs"] if c["k"] == "view")
        after = _bytes(message["after"].values())
    written = sum(after.get(dict(message["inputs"]).get(n, -1), 0) for n in task.written(case.args))
    moved = sum(after.values()) + sum(n for base, n in results.items() if base not in after) + written
    least = floor_us(cost.load(device), moved, compulsory_work.flops(task, case))
    return CaseEstimate(
        case.label(), float(found["estimated_us"]), least, int(found["launches"]), str(found["bound_by"])
    )


def estimate(task: Task, talk: RunnerSession, device: str, sizes: str = "published") -> Estimate | None:
    """Estimate every timing case of the sizes; ``None`` where one cannot be (it reads a value back, a stray size, ...)."""
    largest = max((c for c in task.cases if not c.out), key=lambda c: sum(compulsory_work.numels(task, c).values()))
    drawn = inputs.draw(task, largest, inputs.case_seed(talk.secret, task.id, "estimate", 0, 0))
    tiles = {k: v for k, v in drawn.items() if isinstance(v, torch.Tensor) and v.dtype in wire.NAMES}
    rows = []
    try:
        for case in timed(task, sizes):
            rows.append(_one(task, talk, case, device, tiles))
    except (GradingAborted, EngineError):
        return None
    n = len(rows)
    share = math.exp(sum(math.log(min(1.0, max(r.floor_us, 1e-6) / r.estimated_us)) for r in rows) / n)
    us = math.exp(sum(math.log(r.estimated_us) for r in rows) / n)
    return Estimate(device, us, share, tuple(rows), cost.load(device).sources.get("constants", ""))
