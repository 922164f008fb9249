"""Computes the observations of ``ScheduleEnv``: a float32 vector with entries in [-1, 1], which ``NAMES`` names."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from kbx_env.backends import cost
from kbx_env.envs.schedule import MIDDLE, MOVES, SLOTS, Template
from kbx_env.errors import DeclarationError
from kbx_env.outcome import Fault, Outcome, Verdict
from kbx_env.spec.task import CATEGORIES, Case, Task

VERSION = 1
"""Version of the vector's layout; a policy works only with the version on which it was trained."""
_BYTES = {
    "f16": 2,
    "bf16": 2,
    "f32": 4,
    "f64": 8,
    "i8": 1,
    "i16": 2,
    "i32": 4,
    "i64": 8,
    "u8": 1,
    "bool": 1,
    "c64": 8,
    "c128": 16,
}
"""Size of an element in bytes, by dtype."""
_REDUCES = (
    "tl.sum",
    "tl.max(",
    "tl.min(",
    "tl.argmax",
    "tl.argmin",
    "tl.reduce",
    "tl.cumsum",
    "tl.associative_scan",
    "tl.sort",
)
"""Parts of a source that show a reduction or scan."""
_SCALES = {"bytes": 40.0, "flops": 50.0, "intensity": 20.0, "largest": 30.0, "last": 30.0}
"""Divisors that bring the logarithms of ``_sizes`` into [-1, 1]."""

LEGAL = slice(0, len(SLOTS) * len(MOVES))
"""Entries that are 1 for moves with an effect of their own (``Template.legal``), else 0; always 1 for the middle."""


def _names() -> tuple[str, ...]:
    names = [f"legal.{i}.{kind}{move:+d}" for i, kind in enumerate(SLOTS) for move in MOVES]
    names += [f"{what}.{i}.{kind}" for i, kind in enumerate(SLOTS) for what in ("present", "value", "knobs")]
    names += [f"category.{c}" for c in CATEGORIES]
    names += ["difficulty", "reduces", "products", "atomics", "item_bytes", "moves_only"]
    names += [f"{what}.{of}" for what in _SCALES for of in ("least", "mean", "most")]
    names += ["cuda", "device_known", "bandwidth", "sms", "tensor", "l2", "shared"]
    names += [
        "turn",
        "graded",
        "masked",
        "correct",
        "compiled",
        "timeout",
        "passed",
        "reward",
        "speedup",
        "registers",
        "spills",
    ]
    return (*names, *(f"move.{i}.{kind}" for i, kind in enumerate(SLOTS)))


NAMES = _names()
"""Name of each entry of the vector."""
_AFTER = NAMES.index("turn")
"""Number of entries that stay the same during an episode; they come first."""


def device_for(backend: str, estimate: str | None) -> cost.Device | None:
    """Return the GPU that observations describe.

    Args:
        backend: ``cpu`` or ``cuda``.
        estimate: on the CPU, name of the GPU for which gradings estimate the time.

    Returns:
        On the CPU the GPU of the estimate, on CUDA that of this machine; ``None`` if unknown to the cost model.
    """
    if backend == "cpu":
        return cost.load(estimate) if estimate else None
    import torch

    name = torch.cuda.get_device_name(0).lower().replace(" ", "") if torch.cuda.is_available() else ""
    return next((cost.load(n) for n in sorted(cost.names(), key=len, reverse=True) if n in name), None)


def static(
    task: Task, template: Template, backend: str, device: cost.Device | None, sizes: str = "published"
) -> np.ndarray:
    """Compute the part of the vector that stays the same during an episode.

    Args:
        task: the task.
        template: its expert with knobs in slots.
        backend: ``cpu`` or ``cuda``.
        device: the GPU to describe; ``None`` if unknown.
        sizes: the timed sizes: ``published`` or ``held-out``.

    Returns:
        The first entries of the vector, float32, in [-1, 1].
    """
    from kbx_env.grading.sizes import timed

    found: list[float] = [float(x) for slot in range(len(SLOTS)) for x in template.legal(slot)]
    for knobs in template.slots:
        mean = sum(math.log2(max(k.value, 1)) for k in knobs) / len(knobs) if knobs else 0.0
        found += [float(bool(knobs)), mean / 14, math.log2(1 + len(knobs)) / 6]
    found += [float(task.category == c) for c in CATEGORIES]
    items = max((_BYTES[t.dtype] for t in task.takes.values()), default=0)
    text = template.source
    found += [
        task.difficulty / 10, float(any(r in text for r in _REDUCES)), float("tl.dot" in text), float("tl.atomic" in text),
        items / 16, float(task.moves),
    ]  # fmt: skip
    rows = [_sizes(task, case) for case in timed(task, sizes)]
    for what, scale in _SCALES.items():
        values = [row[what] / scale for row in rows] or [0.0]
        found += [min(values), sum(values) / len(values), max(values)]
    found += [float(backend == "cuda"), float(device is not None)]
    if device is None:
        found += [0.0] * 5
    else:
        tensor = device.tensor_tflops.get("f16", 0.0)
        found += [math.log2(v + 1) / s for v, s in (
            (device.dram_gbs, 16), (device.sms, 10), (tensor, 14), (device.l2_bytes, 32), (device.shared_per_block, 20),
        )]  # fmt: skip
    assert len(found) == _AFTER
    return _bounded(found)


def changing(
    turn: float, last: Outcome | None, moves: Sequence[int] | np.ndarray | None, reward: float, low: float, high: float
) -> np.ndarray:
    """Compute the part of the vector that changes with every grading.

    Args:
        turn: share of the episode's gradings that have been used, 0 to 1.
        last: outcome of the last grading; ``None`` before the first one.
        moves: its move in each slot, integers of shape (8,) from ``MOVES``; ``None`` before the first grading.
        reward: the preset's value for the outcome.
        low: the preset's smallest value.
        high: the preset's largest value.

    Returns:
        The last entries of the vector, float32, in [-1, 1].
    """
    found = [turn]
    if last is None:
        found += [0.0] * (len(NAMES) - _AFTER - 1)
        return _bounded(found)
    builds = [b for b in last.compile if b.target == "sm_90"]
    cases, compiled = last.cases, last.evidence is not None and last.evidence.launches > 0
    found += [
        1.0, float(last.fault is Fault.INFRA), float(last.correct), float(compiled or any(b.ok for b in builds)),
        float(last.verdict is Verdict.TIMEOUT), cases.passed / cases.total if cases and cases.total else 0.0,
        (reward - low) / (high - low), math.log2(max(last.speedup, 1e-3)) / 10 if last.speedup else 0.0,
        max((b.registers or 0 for b in builds), default=0) / 255,
        math.log2(1 + max((b.spills or 0 for b in builds), default=0)) / 16,
    ]  # fmt: skip
    found += [int(m) / max(MOVES) for m in moves] if moves is not None else [0.0] * len(SLOTS)
    return _bounded(found)


def _bounded(values: Sequence[float]) -> np.ndarray:
    return np.clip(np.array(values, np.float32), -1.0, 1.0)


def _sizes(task: Task, case: Case) -> dict[str, float]:
    """Return log2 of bytes of the inputs (or as declared), operations, operations per byte, largest and last axis."""
    from kbx_env.grading import compulsory_work

    axes: list[Any] = [a for v in case.axes.values() for a in (v if isinstance(v, tuple) else (v,))]
    numels = compulsory_work.numels(task, case)
    total: float = sum(n * _BYTES[case.dtypes.get(t, task.takes[t].dtype)] for t, n in numels.items())
    try:
        flops = float(compulsory_work.operations(task, case))
        declared = compulsory_work.declared_bytes(task, case)
        total = total if declared is None else float(declared)
    except DeclarationError:  # an expression with a value that is known only during a grading
        flops = 0.0
    data, work = math.log2(max(total, 1.0)), math.log2(max(flops, 1.0))
    sizes = [math.log2(max(int(a), 1)) for a in axes] or [0.0]
    return {"bytes": data, "flops": work, "intensity": work - data, "largest": max(sizes), "last": sizes[-1]}


assert NAMES[LEGAL][MIDDLE].endswith("+0")
