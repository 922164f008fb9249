"""Whether a result was made of the integers that a quantization scheme demands: other integers must give another result.

A kernel may hold the same integers as floats, and compute int8 products that nobody needs beside them. So the engine
executes a correct call once more and exchanges the integers exactly where the scheme demands them, by a secret table:
the int8 operands of matrix products, what a rounding to int8 gives, the bytes that hold two weights. The reference knows
the same table, and every element must follow, to the accuracy of the scheme itself. What was made of anything else stays
what it was. How a product is tiled or split makes no difference, because each integer is exchanged by itself.
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
"""At most, for a call that was executed before; the submission's time is not used."""
BLOCK = (3, 4, 5)
"""Integers exchanged in a ring: never two, which a second exchange would put right."""
_DONE = {
    "products": ("operations of int8 products", "with other int8 numbers as operands of the products"),
    "roundings": ("numbers rounded to int8", "with other numbers out of the roundings to int8"),
    "bytes": ("bytes loaded and unpacked", "with other bytes out of memory, two int4 weights in each"),
}


def neighbours(rng: random.Random) -> list[int]:
    """A table that exchanges every int8 for a near one, 0 and 1 excepted (padding, and sums by a product with ones).

    Near, so that an exponential or a division on the way stays as well conditioned as it was.
    """
    table = list(range(256))
    for first, sign in ((2, 1), (1, -1)):
        k = first
        while k <= 127:
            size = rng.choice(BLOCK)
            # What would be left over is too small for a block of its own.
            size = 128 - k if 128 - k - size < min(BLOCK) else size
            by = rng.choice((1, size - 1))
            for i in range(size):
                table[sign * (k + i) & 255] = sign * (k + (i + by) % size) & 255
            k += size
    return table


def pairs(rng: random.Random) -> list[int]:
    """A table that exchanges bytes of two int4, each in -7 .. 7, as a whole: either half depends on both. 0 stays 0."""
    codes = [c for c in range(256) if c & 15 != 8 and c >> 4 != 8 and c]
    others = rng.sample(codes, len(codes))
    table = [rng.choice(codes) for _ in range(256)]
    for code, other in zip(codes, others, strict=True):
        table[code] = other
    return [0, *table[1:]]


def flaw(task: Task, case: Case, call: CallResult, talk: RunnerSession, index: int) -> str:
    """What shows that a correct call was not computed as the scheme demands; nothing if it was."""
    from kbx_env.grading import judge as judges
    from kbx_env.tasks import _schemes

    truth, engine = task.truth, talk.engine
    if not isinstance(truth, QuantizationScheme) or engine is None:
        raise DeclarationError(f"{task.id}: no scheme to look for")
    rng = random.Random(inputs.case_seed(talk.secret, task.id, f"{talk.split} scheme", index, 0))
    table = pairs(rng) if truth.disturb == "bytes" else neighbours(rng)
    amount, how = _DONE[truth.disturb]
    sizes = compulsory_work.numels(task, case) | {"result": sum(t.numel() for t in call.answer.outputs)}
    least = compulsory_work.evaluate(truth.least, compulsory_work.names(task, case), sizes)
    try:
        outputs, touched = engine.again(truth.disturb, table, SECONDS)
    except EngineError as e:
        if e.kind in ("memory", "runtime"):
            return f"case {case.label()}: {how} the kernel fails: {e.name}"
        raise talk.ended(e) from None
    if touched < least:
        return f"case {case.label()}: {touched} {amount}, the scheme demands {least:.0f} at least"
    answer = replace(call.answer, outputs=outputs)
    token = _schemes.TABLE.set(torch.tensor(table))
    try:
        for totals in (engine.totals, not engine.totals):
            _schemes.TOTALS.set(totals)
            if judges.judge(task, case, call.args, [answer]).passed:
                engine.totals = totals  # what a kernel does in one case it does in the next: tried first there
                return ""
    finally:
        _schemes.TABLE.reset(token)
        _schemes.TOTALS.set(False)
    return f"case {case.label()}: {how} the result does not become what follows from them, so it was made of others"
