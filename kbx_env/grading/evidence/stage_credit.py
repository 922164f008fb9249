"""Which stages of a quantization scheme a kernel holds whose values are wrong: seen by the grader, never told by the submission.

The engine executes the wrong call again. Once as it was, and counts the integers that go into int8 products, come out of
roundings to int8 or out of packed bytes: counts know nothing of tiles and orders, and nobody hits those of secret inputs but by
quantizing them so. Once with other integers, as ``scheme.py`` does: a result that does not move was not made of them, and then
no stage is credited.
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
"""Wrong cases that are looked at; each costs two or three executions."""
LEAST = 32
"""Integers other than 0 that an operand must have: fewer are alike by accident."""
ALIKE = 0.01
"""Share of the integers that may lie in other bins. Honest formulas differ in one of 10^6, truncation in half of them."""
MOVES = 0.1
"""The result must move by this share of what the reference moves by, every element beside its own size."""
COARSE_DB = 10.0
"""A dequantized result may have this much more noise than the scheme."""
MARGIN_DB = 40.0
"""A deviation so far below the scheme's own noise is as good as none."""
_PLACES = {"products": "product", "bytes": "packing"}
_OWN = {"products": ("scale", "rounding", "clamp", "product"), "bytes": ("scale", "rounding", "clamp", "packing"),
        "roundings": ("scale", "rounding", "clamp")}  # fmt: skip


def names(truth: QuantizationScheme) -> tuple[str, ...]:
    """The stages of a scheme."""
    return (*_OWN[truth.disturb], "dequantization", "margin")


def mean(rows: Sequence[Mapping[str, float]]) -> dict[str, float] | None:
    """Each stage's share over the cases; ``None`` where none was looked at."""
    return {k: sum(r[k] for r in rows) / len(rows) for k in rows[0]} if rows else None


def stages(task: Task, case: Case, call: CallResult, talk: RunnerSession, index: int) -> dict[str, float] | None:
    """The stages that hold in one wrong case, as shares of its operands; ``None`` where that cannot be seen.

    They build on each other: what comes after the scales counts for operands with the right ones, so that a coarser scheme, which
    is easier and faster, is no step towards the one that is asked for.

    Args:
        task: a quantized task.
        case: the case.
        call: the call that was judged, the last one of the engine.
        talk: the submission.
        index: of the case.
    """
    truth, engine = task.truth, talk.engine
    assert isinstance(truth, QuantizationScheme) and engine is not None
    nothing = dict.fromkeys(names(truth), 0.0)
    expected = {f: _integers(task, case, call.args, f) for f in ("divide", "truncate")}
    if not all(expected.values()):
        # Truncation leaves fewer integers than rounding, in small operands with an outlier too few to know it by.
        return None
    try:
        seen = engine.census(metamorphic.SECONDS)
        rng = random.Random(inputs.case_seed(talk.secret, task.id, f"{talk.split} partial", index, 0))
        amount, moves = _response(task, case, call, talk, truth.disturb, rng)
        made = moves or (truth.disturb == "products" and _response(task, case, call, talk, "roundings", rng)[1])
    except EngineError as e:
        if e.kind in ("memory", "runtime", "policy"):
            return nothing
        raise talk.ended(e) from None
    if not made:
        return nothing
    found = nothing | _operands(seen, expected, 8 if truth.disturb == "bytes" else 128)
    facts = call.facts
    kinds = {k for k, known in facts.operands if known} if facts is not None else set()
    reached = set().union(*(o.dots for o in call.origins))
    sizes = compulsory_work.numels(task, case) | {"result": sum(o.numel() for o in call.answer.outputs)}
    enough = amount >= compulsory_work.evaluate(truth.least, compulsory_work.names(task, case), sizes)
    demanded = moves and enough and bool(kinds & reached & set(truth.dots))
    if truth.disturb in _PLACES:
        found[_PLACES[truth.disturb]] = found["scale"] * demanded
    if demanded:
        found |= {k: found["scale"] * v for k, v in _noise(task, case, call).items()}
    return found


def _integers(task: Task, case: Case, args: Mapping[str, Any], formula: str) -> list[torch.Tensor]:
    """Counts of the integers of every operand under one formula, none if one is too small; 0 is padding as well and not counted."""
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
    """Shares of the operands with the right scale, and of these with the right rounding and range."""
    rows = [torch.tensor(r, dtype=torch.float64) for r in seen]
    if half == 8:  # of both numbers of a byte
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
    task: Task, case: Case, call: CallResult, talk: RunnerSession, place: str, rng: random.Random
) -> tuple[int, bool]:  # fmt: skip
    """How much work met other integers at a place, and whether the result moved as one that is made of them."""
    from kbx_env.tasks import _schemes

    assert talk.engine is not None
    table = metamorphic.pairs(rng) if place == "bytes" else metamorphic.neighbours(rng)
    outputs, touched = talk.engine.again(place, table, metamorphic.SECONDS)
    if not touched:
        return 0, False
    before = reference.expect(task, case, call.args, exact=False).native
    token = _schemes.TABLE.set(torch.tensor(table))
    try:
        after = reference.expect(task, case, call.args, exact=False).native
    finally:
        _schemes.TABLE.reset(token)
    mine = _moved(call.answer.outputs, outputs)
    return touched, mine > 0 and mine >= MOVES * _moved(before, after)


def _moved(before: Sequence[torch.Tensor], after: Sequence[torch.Tensor]) -> float:
    """Mean over the elements of |difference| / (|before| + |after|), 0 .. 1; what is no number has not moved.

    Each element beside its own size, not the whole beside its norm: a result without scales has other units in every row, and a
    row with an outlier would be all that is seen of the reference's and nothing of the kernel's.
    """
    moved, count = 0.0, 0
    for a, b in zip(before, after, strict=False):
        if a.shape == b.shape and a.dtype.is_floating_point:
            x, y = a.to(torch.float64), b.to(torch.float64)
            share = (x - y).abs() / (x.abs() + y.abs())
            moved, count = moved + float(torch.nan_to_num(share, 0.0, 0.0, 0.0).sum()), count + x.numel()
    return moved / count if count else 0.0


def _noise(task: Task, case: Case, call: CallResult) -> dict[str, float]:
    """Whether the result has the units of the unquantized one, and how far its deviation from the scheme lies below the
    scheme's own noise. An unquantized product explains nothing of that noise: 0 dB, and no credit."""
    from kbx_env.tasks._schemes import EXACT

    ideal = reference.expect(task, case, call.args).outputs[0]
    plain, cut = (reference.expect(task, case, call.args, rounding=(f,) * 4).outputs[0] for f in (EXACT, "truncate"))
    got = call.answer.outputs[0].to(torch.float64) if call.answer.outputs else torch.zeros(0)
    if got.shape != ideal.shape or not bool(torch.isfinite(got).all()):
        return {}
    own, mine = float((ideal - plain).square().sum()), float((got - plain).square().sum())
    if own <= 0.0:
        return {}
    off = float((got - ideal).square().sum())
    # What truncation loses is no fixed share of what rounding does: in small operands with an outlier up to 15 dB more.
    whole = mine <= own * 10 ** (COARSE_DB / 10) or float((got - cut).square().sum()) <= own
    below = 10 * math.log10(own / off) if off > 0 else MARGIN_DB
    return {
        "dequantization": float(whole),
        "margin": min(1.0, max(0.0, below / MARGIN_DB)),
    }
