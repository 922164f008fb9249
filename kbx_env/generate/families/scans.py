"""Scans: cumulative sums, means and extremes of an elementwise expression along one axis."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass

from kbx_env.generate import text
from kbx_env.generate.drafts import Draft, Voice
from kbx_env.generate.expressions import draw, formula, head, leaf, meanings, statements
from kbx_env.generate.families.rows import AXES, draw_row, said, span_of


@dataclass(frozen=True)
class Scan:
    """A scan of the values z of a row.

    Attributes:
        torch: over the axis ``AXIS``.
        block: the scan of a block ``z``, in Triton; ``carry`` is the total of the blocks before it.
        start: the first ``carry``.
        join: ``carry`` behind the block.
        text: as a formula of z[0], z[1], ...
        word: part of the function's name.
        backwards: whether the scan begins at the end.
    """

    torch: str
    block: str
    start: str
    join: str
    text: str
    word: str
    backwards: bool = False


ADDED = "tl.where(inside, z, 0.0)"
LARGEST = 'tl.where(inside, z, float("-inf"))'
SMALLEST = 'tl.where(inside, z, float("inf"))'
SCANS: Mapping[str, Scan] = {
    "cumsum": Scan(
        "torch.cumsum(z, AXIS)",
        f"carry + tl.cumsum({ADDED}, 0)",
        "0.0",
        f"carry + tl.sum({ADDED}, 0)",
        "r[i] = z[0] + ... + z[i]",
        "cumsum",
    ),
    "reverse_cumsum": Scan(
        "torch.flip(torch.cumsum(torch.flip(z, (AXIS,)), AXIS), (AXIS,))",
        f"carry + tl.cumsum({ADDED}, 0)",
        "0.0",
        f"carry + tl.sum({ADDED}, 0)",
        "r[i] = z[i] + ... + z[N - 1]",
        "reverse_cumsum",
        True,
    ),
    "running_mean": Scan(
        "torch.cumsum(z, AXIS) / torch.cumsum(torch.ones_like(z), AXIS)",
        f"(carry + tl.cumsum({ADDED}, 0)) / (at + 1).to(tl.float32)",
        "0.0",
        f"carry + tl.sum({ADDED}, 0)",
        "r[i] = (z[0] + ... + z[i]) / (i + 1)",
        "running_mean",
    ),
    "cummax": Scan(
        "torch.cummax(z, AXIS).values",
        f"tl.maximum(carry, tl.associative_scan({LARGEST}, 0, _larger))",
        'float("-inf")',
        f"tl.maximum(carry, tl.max({LARGEST}, 0))",
        "r[i] = max(z[0], ..., z[i])",
        "cummax",
    ),
    "cummin": Scan(
        "torch.cummin(z, AXIS).values",
        f"tl.minimum(carry, tl.associative_scan({SMALLEST}, 0, _smaller))",
        'float("inf")',
        f"tl.minimum(carry, tl.min({SMALLEST}, 0))",
        "r[i] = min(z[0], ..., z[i])",
        "cummin",
    ),
}
JOINS = {"_larger": "maximum", "_smaller": "minimum"}
KERNEL = """@triton.jit
def _kernel({pointers}, out, n, BLOCK: tl.constexpr):
    base = tl.program_id(0).to(tl.int64) * n
    carry = {start}
    for k0 in range(0, n, BLOCK):
{values}
        r = {block}
{after}
        tl.store(out + base + at, {result}.to(out.dtype.element_ty), mask=inside)
        carry = {join}


def ENTRY({parameters}):
{dense}
    n = {first}.shape[-1]
    out = torch.empty({first}.shape, dtype={first}.dtype, device={first}.device)
    if out.numel():
        BLOCK = min(1024, triton.next_power_of_2(n))
        _kernel[(out.numel() // n,)]({tensors}, out, n, BLOCK=BLOCK, num_warps=4)
    return {returned}
"""


def scan(rng: random.Random, level: int) -> Draft:
    """Draw a scan of an expression, with elementwise work on the result."""
    voice = Voice(rng)
    found = SCANS[rng.choice(tuple(SCANS))]
    extreme = found.word.startswith(("cummax", "cummin"))
    row = draw_row(
        rng,
        rng.randint(max(0, level - 2), 2 * level - 1),
        1 + (rng.random() < 0.4 and level > 1),
        largest=2e4 if extreme else 60.0,
    )
    behind = None
    if level > 1 and rng.random() < 0.6 and (extreme or found.word == "running_mean"):
        behind = draw(rng, [leaf("r", span_of(row, ""))], rng.randint(1, 2))
    d = AXES[row.axis][1]
    lines = statements(behind, prefix="w") if behind else None
    values = row.values()
    if found.backwards:
        values[:2] = ["position = k0 + tl.arange(0, BLOCK)", "inside = position < n", "at = n - 1 - position"]
    joins = "".join(
        f"@triton.jit\ndef {k}(a, b):\n    return tl.{v}(a, b)\n\n\n" for k, v in JOINS.items() if k in found.block
    )
    code = "\n".join([*values, *(lines.body if lines else ())])
    expert = head(code, joins) + KERNEL.format(
        pointers=text.pointers(row.tensors),
        start=found.start,
        values=text.indented(values, 2),
        block=found.block,
        after=text.indented(lines.body, 2) if lines else "",
        result=lines.result if lines else "r",
        join=found.join,
        parameters=", ".join(row.tensors),
        dense=row.dense(),
        first=row.tensors[0],
        tensors=", ".join(row.tensors),
        returned="out" if row.axis == "last" else f"out.movedim(-1, {d})",
    )
    over, step = AXES[row.axis][2], row.about(found.text)
    subject = f"z = {formula(row.tree)}" if row.tree.op else row.tensors[0]
    given = f"With {subject} and indices" if row.tree.op else "With indices"
    end = f"; the result is {formula(behind) if behind else 'r'}."
    summary = voice.one(f"A scan of {subject} along {over}: {step}{end}", f"{given} along {over}, {step}{end}")
    details = (
        voice.where(meanings(row.tree, behind)),
        said(row, voice, result="The result is a new tensor of the same shape and dtype."),
        voice.closing(voice.rounding(row.dtype), row.tensors),
    )
    return Draft(
        family="scan",
        category="math",
        words=(*row.tree.words()[:2], found.word, *(behind.words()[:1] if behind else ())),
        parameters=", ".join(row.tensors),
        body=(
            f"z = {row.tree.written('torch')}",
            f"r = {found.torch.replace('AXIS', str(d))}",
            f"return {behind.written('torch')}" if behind else "return r",
        ),
        summary=summary,
        details=details,
        examples=(row.example(rng),),
        takes=dict.fromkeys(row.tensors, row.dtype),
        fields=row.fields(row.tree.flops() + 2, row.takes()),
        expert=expert,
        size=row.tree.count() + 4 + (behind.count() if behind else 0),
        imports=("from kbx_env.tasks._varied import sizes",),
    )


FAMILIES = {"scan": scan}
