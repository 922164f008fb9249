"""Tests by metamorphic re-execution that a result was computed from the integers that a quantization scheme demands.

A kernel may hold the same integers as floats, and compute int8 products that do not enter its result. So the engine
executes a correct call once more and exchanges the integers exactly where the scheme demands them, by a secret table:
the int8 operands of matrix products, the results of roundings to int8, or the bytes that hold two int4 weights. The
reference uses the same table, and every element of the kernel's result must follow it, to the accuracy of the scheme
itself. A result that was computed from other values does not change. The tiling of a product makes no difference,
because each integer is exchanged by itself.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from kbx_env.errors import DeclarationError
from kbx_env.grading import compulsory_work, inputs
from kbx_env.grading.runtime.engine_client import EngineError
from kbx_env.spec.criteria import QuantizationScheme
from kbx_env.spec.task import Case, Task

if TYPE_CHECKING:
    from kbx_env.grading.runtime.session import CallResult, RunnerSession

SECONDS = 20.0
"""Time limit for executing a call again; it does not count as the submission's time."""
BLOCK = (3, 4, 5)
"""Lengths of the cycles in which integers are exchanged: never two, which a second exchange would undo."""
_DONE = {
    "products": ("operations of int8 products", "with other int8 numbers as operands of the products"),
    "roundings": ("numbers rounded to int8", "with other numbers out of the roundings to int8"),
    "bytes": ("bytes loaded and unpacked", "with other bytes out of memory, two int4 weights in each"),
}
"""By ``QuantizationScheme.disturb``: what is counted, and how the call was executed again; for messages."""


def neighbours(rng: random.Random) -> list[int]:
    """Return a table that exchanges every int8 except 0 and 1 for a near one.

    Near values keep exponentials and divisions as well conditioned as before. 0 is used for padding, and 1 for sums by
    a product with ones.

    Args:
        rng: draws the cycles.

    Returns:
        256 entries: the new byte of each byte, both as two's complement.
    """
    table = list(range(256))
    for first, sign in ((2, 1), (1, -1)):
        k = first
        while k <= 127:
            size = rng.choice(BLOCK)
            # A rest that is shorter than the shortest cycle is added to the last one.
            size = 128 - k if 128 - k - size < min(BLOCK) else size
            by = rng.choice((1, size - 1))
            for i in range(size):
                table[sign * (k + i) & 255] = sign * (k + (i + by) % size) & 255
            k += size
    return table


def pairs(rng: random.Random) -> list[int]:
    """Return a table that exchanges bytes of two int4, each in -7 .. 7, as a whole: each new half depends on both old
    ones.

    Args:
        rng: draws the table.

    Returns:
        256 entries: the new byte of each byte; 0 stays 0.
    """
    codes = [c for c in range(256) if c & 15 != 8 and c >> 4 != 8 and c]
    others = rng.sample(codes, len(codes))
    table = [rng.choice(codes) for _ in range(256)]
    for code, other in zip(codes, others, strict=True):
        table[code] = other
    return [0, *table[1:]]


def flaw(task: Task, case: Case, call: CallResult, session: RunnerSession, index: int) -> str:
    """Execute a correct call again with exchanged integers.

    Args:
        task: a quantized task.
        case: the case.
        call: the call that was judged, the last one of the engine.
        session: with the submission.
        index: of the case; seeds the table.

    Returns:
        Why the result was not computed by the scheme; empty if it was.

    Raises:
        DeclarationError: the task has no quantization scheme, or no engine executes the calls.
        GradingAborted: the engine failed.
    """
    from kbx_env.grading import judge as judges
    from kbx_env.tasks import _schemes

    truth, engine = task.truth, session.engine
    if not isinstance(truth, QuantizationScheme) or engine is None:
        raise DeclarationError(f"{task.id}: no scheme to look for")
    rng = random.Random(inputs.case_seed(session.secret, task.id, f"{session.split} scheme", index, 0))
    table = pairs(rng) if truth.disturb == "bytes" else neighbours(rng)
    amount, how = _DONE[truth.disturb]
    sizes = compulsory_work.numels(task, case) | {"result": sum(t.numel() for t in call.answer.outputs)}
    least = compulsory_work.evaluate(truth.least, compulsory_work.names(task, case), sizes)
    try:
        outputs, touched = engine.again(truth.disturb, table, SECONDS)
    except EngineError as e:
        if e.kind in ("memory", "runtime"):
            return f"case {case.label()}: {how} the kernel fails: {e.name}"
        raise session.ended(e) from None
    if touched < least:
        return f"case {case.label()}: {touched} {amount}, the scheme demands {least:.0f} at least"
    answer = replace(call.answer, outputs=outputs)
    token = _schemes.TABLE.set(torch.tensor(table))
    try:
        for totals in (engine.totals, not engine.totals):
            _schemes.TOTALS.set(totals)
            if judges.judge(task, case, call.args, [answer]).passed:
                engine.totals = totals  # the next case probably needs the same setting: it is tried first
                return ""
    finally:
        _schemes.TABLE.reset(token)
        _schemes.TOTALS.set(False)
    return f"case {case.label()}: {how} the result does not become what follows from them, so it was made of others"
