"""Partial credit for wrong quantized kernels: which stages of the scheme hold, as observed by the grader.

The engine executes the wrong call twice more. The first time it counts the integers that enter int8 products, result
from roundings to int8 or are unpacked from bytes. These counts do not depend on tiling or order, and only a kernel that
quantizes the secret inputs in this way reaches them. The second time it exchanges integers, as ``metamorphic.py`` does:
a result that does not change was not computed from them, and then no stage is credited.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from kbx_env.grading import compulsory_work, inputs, reference
from kbx_env.grading.evidence import metamorphic
from kbx_env.grading.runtime.engine_client import EngineError
from kbx_env.spec.criteria import QuantizationScheme
from kbx_env.spec.task import Case, Task

if TYPE_CHECKING:
    from kbx_env.grading.runtime.session import CallResult, RunnerSession

LOOKS = 3
"""Wrong cases that are examined; each costs two or three executions."""
LEAST = 32
"""Integers other than 0 that an operand must have: the counts of fewer may agree by chance."""
ALIKE = 0.01
"""Share of the integers that may lie in other bins. Honest formulas differ in one of 10^6, truncation in half of
them."""
MOVES = 0.1
"""The result must change by this share of the reference's change; each element relative to its own size."""
COARSE_DB = 10.0
"""Decibels by which the noise of a dequantized result may exceed the scheme's."""
MARGIN_DB = 40.0
"""A deviation this many decibels below the scheme's own noise gets full credit."""
_STAGE_OF = {"products": "product", "bytes": "packing"}
"""By ``QuantizationScheme.disturb``: the stage that holds if the result changes with exchanged integers."""
_OWN = {"products": ("scale", "rounding", "clamp", "product"), "bytes": ("scale", "rounding", "clamp", "packing"),
        "roundings": ("scale", "rounding", "clamp")}  # fmt: skip
"""By ``QuantizationScheme.disturb``: the stages before dequantization."""


def names(truth: QuantizationScheme) -> tuple[str, ...]:
    """Return the names of a scheme's stages."""
    return (*_OWN[truth.disturb], "dequantization", "margin")


def mean(rows: Sequence[Mapping[str, float]]) -> dict[str, float] | None:
    """Return each stage's mean over the cases; ``None`` if no case was examined."""
    return {k: sum(r[k] for r in rows) / len(rows) for k in rows[0]} if rows else None


def stages(task: Task, case: Case, call: CallResult, session: RunnerSession, index: int) -> dict[str, float] | None:
    """Determine which stages hold in one wrong case.

    The stages build on each other: those after the scales count only for operands with the right scales, so that a
    coarser scheme, which is easier and faster, is no step towards the declared one.

    Args:
        task: a quantized task.
        case: the case.
        call: the call that was judged, the last one of the engine.
        session: with the submission.
        index: of the case; seeds the table of exchanged integers.

    Returns:
        By stage the share of the operands in which it holds, from 0 to 1; ``None`` where that cannot be determined.

    Raises:
        GradingAborted: the engine failed.
    """
    truth, engine = task.truth, session.engine
    assert isinstance(truth, QuantizationScheme) and engine is not None
    nothing = dict.fromkeys(names(truth), 0.0)
    expected = {f: _integers(task, case, call.args, f) for f in ("divide", "truncate")}
    if not all(expected.values()):
        # Truncation leaves fewer integers than rounding; in small operands with an outlier they are too few to be
        # recognized.
        return None
    try:
        seen = engine.census(metamorphic.SECONDS)
        rng = random.Random(inputs.case_seed(session.secret, task.id, f"{session.split} partial", index, 0))
        amount, moves = _response(task, case, call, session, truth.disturb, rng)
        used = moves or (truth.disturb == "products" and _response(task, case, call, session, "roundings", rng)[1])
    except EngineError as e:
        if e.kind in ("memory", "runtime", "policy"):
            return nothing
        raise session.ended(e) from None
    if not used:
        return nothing
    found = nothing | _operands(seen, expected, 8 if truth.disturb == "bytes" else 128)
    facts = call.facts
    kinds = {k for k, known in facts.operands if known} if facts is not None else set()
    reached = set().union(*(o.dots for o in call.origins))
    sizes = compulsory_work.numels(task, case) | {"result": sum(o.numel() for o in call.answer.outputs)}
    enough = amount >= compulsory_work.evaluate(truth.least, compulsory_work.names(task, case), sizes)
    demanded = moves and enough and bool(kinds & reached & set(truth.dots))
    if truth.disturb in _STAGE_OF:
        found[_STAGE_OF[truth.disturb]] = found["scale"] * demanded
    if demanded:
        found |= {k: found["scale"] * v for k, v in _noise(task, case, call).items()}
    return found


def _integers(task: Task, case: Case, args: Mapping[str, Any], formula: str) -> list[torch.Tensor]:
    """Count the integers of every operand under one rounding formula.

    Args:
        task: a quantized task.
        case: the case.
        args: the arguments of the call.
        formula: of the rounding.

    Returns:
        For each operand 256 float64 counts by byte, without 0, which is also padding; an empty list if an operand has
        fewer than ``LEAST`` integers.
    """
    from kbx_env.tasks import _schemes

    kept: list[torch.Tensor] = []
    token = _schemes.SEEN.set(kept)
    try:
        reference.expect(task, case, args, rounding=(formula,) * 4, exact=False)
    finally:
        _schemes.SEEN.reset(token)
    rows = [torch.bincount(q & 255, minlength=256).to(torch.float64) for q in kept]
    for r in rows:
        r[0] = 0.0
    return rows if all(float(r.sum()) >= LEAST for r in rows) else []


def _operands(seen: list[list[int]], expected: Mapping[str, list[torch.Tensor]], half: int) -> dict[str, float]:
    """Compare the integers of the kernel with those of the reference.

    Args:
        seen: 256 counts by byte, for each place of the kernel.
        expected: by formula, the counts of each operand.
        half: 8 for packed int4, 128 for int8.

    Returns:
        Shares of the operands with the right scale, and of these with the right rounding and range.
    """
    rows = [torch.tensor(r, dtype=torch.float64) for r in seen]
    if half == 8:  # count both int4 of a byte
        square = [r.view(16, 16) for r in rows]
        rows = [s.sum(0) + s.sum(1) for s in square]
        rows = [torch.cat((r[:8], torch.zeros(240, dtype=torch.float64), r[8:])) for r in rows] + [
            torch.tensor(r, dtype=torch.float64) for r in seen
        ]
    for r in rows:
        r[0] = 0.0
    rows = [r / r.sum() for r in rows if float(r.sum()) > 0]
    total = {"scale": 0.0, "rounding": 0.0, "clamp": 0.0}
    count = len(expected["divide"])
    for k in range(count):
        best, formula, row = ALIKE, "", rows[:0]
        for name, operands in expected.items():
            for r in rows:
                apart = float((r - operands[k] / operands[k].sum()).abs().sum()) / 2
                if apart < best:
                    best, formula, row = apart, name, [r]
        for r in row:
            total["scale"] += 1
            total["rounding"] += formula == "divide"
            total["clamp"] += float(r[256 - half]) == 0.0
    return {k: v / count for k, v in total.items()}


def _response(
    task: Task, case: Case, call: CallResult, session: RunnerSession, place: str, rng: random.Random
) -> tuple[int, bool]:  # fmt: skip
    """Execute the call again with exchanged integers.

    Args:
        task: a quantized task.
        case: the case.
        call: the call.
        session: with the submission.
        place: where integers are exchanged: ``products``, ``roundings`` or ``bytes``.
        rng: draws the table.

    Returns:
        The amount of work with exchanged integers, and whether the result changed like one that is computed from them.
    """
    from kbx_env.tasks import _schemes

    assert session.engine is not None
    table = metamorphic.pairs(rng) if place == "bytes" else metamorphic.neighbours(rng)
    outputs, touched = session.engine.again(place, table, metamorphic.SECONDS)
    if not touched:
        return 0, False
    before = reference.expect(task, case, call.args, exact=False).native
    token = _schemes.TABLE.set(torch.tensor(table))
    try:
        after = reference.expect(task, case, call.args, exact=False).native
    finally:
        _schemes.TABLE.reset(token)
    change = _relative_change(call.answer.outputs, outputs)
    return touched, change > 0 and change >= MOVES * _relative_change(before, after)


def _relative_change(before: Sequence[torch.Tensor], after: Sequence[torch.Tensor]) -> float:
    """Return the mean over all elements of |after - before| / (|before| + |after|).

    Each element counts relative to its own size, not to the norm of the result: a result without scales has other units
    in every row, and a row with an outlier would dominate the reference's change and not the kernel's.

    Args:
        before: results; those that are not floating point are left out.
        after: the results to compare, in the same order.

    Returns:
        0 to 1; NaN and infinity count as unchanged.
    """
    moved, count = 0.0, 0
    for a, b in zip(before, after, strict=False):
        if a.shape == b.shape and a.dtype.is_floating_point:
            x, y = a.to(torch.float64), b.to(torch.float64)
            share = (x - y).abs() / (x.abs() + y.abs())
            moved, count = moved + float(torch.nan_to_num(share, 0.0, 0.0, 0.0).sum()), count + x.numel()
    return moved / count if count else 0.0


def _noise(task: Task, case: Case, call: CallResult) -> dict[str, float]:
    """Compare the result with the scheme and with the unquantized product.

    Args:
        task: a quantized task.
        case: the case.
        call: the call.

    Returns:
        ``dequantization``: 1 if the result has the units of the unquantized one. ``margin``: how far its deviation from
        the scheme lies below the scheme's own noise, as a share of ``MARGIN_DB``; an unquantized product deviates by
        all of that noise (0 dB) and gets 0. Empty where the result has another shape or is not finite.
    """
    from kbx_env.tasks._schemes import EXACT

    ideal = reference.expect(task, case, call.args).outputs[0]
    plain, cut = (reference.expect(task, case, call.args, rounding=(f,) * 4).outputs[0] for f in (EXACT, "truncate"))
    got = call.answer.outputs[0].to(torch.float64) if call.answer.outputs else torch.zeros(0)
    if got.shape != ideal.shape or not bool(torch.isfinite(got).all()):
        return {}
    scheme_noise, noise = float((ideal - plain).square().sum()), float((got - plain).square().sum())
    if scheme_noise <= 0.0:
        return {}
    off = float((got - ideal).square().sum())
    # The noise of truncation is no fixed multiple of that of rounding: in small operands with an outlier it is up to 15
    # dB more.
    dequantized = noise <= scheme_noise * 10 ** (COARSE_DB / 10) or float((got - cut).square().sum()) <= scheme_noise
    below = 10 * math.log10(scheme_noise / off) if off > 0 else MARGIN_DB
    return {
        "dequantization": float(dequantized),
        "margin": min(1.0, max(0.0, below / MARGIN_DB)),
    }
