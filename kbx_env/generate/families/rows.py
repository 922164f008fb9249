"""Functions of rows: reductions, softmax and norms of an elementwise expression, with more elementwise work behind.

One program computes one row, in blocks, however long it is. The statistics of a row are accumulated in passes; the last
pass writes. ``Row`` has the parts that the backward passes (``backward``) need as well.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from kbx_env.generate import text
from kbx_env.generate.drafts import Draft, Voice, listed
from kbx_env.generate.expressions import Interval, Node, draw, formula, head, leaf, meanings, statements
from kbx_env.generate.families.elementwise import choose_dtype


@dataclass(frozen=True)
class Statistic:
    """A number of each row, from the values z of the row.

    Attributes:
        torch: of ``z`` over the axis ``AXIS``, in torch; ``KEEP`` stands for ``keepdim``.
        passes: by pass: start value, what a block adds (from ``z``, ``inside`` and earlier numbers), how blocks join.
        result: the number, from the last accumulators.
        text: as a formula of the row's values z.
        word: part of the function's name.
        flops: operations for each element.
        grows: whether it grows with the length of the row.
        bounds: whether its interval is that of z.
    """

    torch: str
    passes: tuple[tuple[str, str, str, str], ...]
    result: str
    text: str
    word: str
    flops: int = 1
    grows: bool = False


SUM = ("0.0", "tl.sum(tl.where(inside, {}, 0.0), 0)", "{0} + {1}")
STATISTICS: Mapping[str, Statistic] = {
    "sum": Statistic(
        "torch.sum(z, AXIS)", (("s", SUM[0], SUM[1].format("z"), SUM[2]),), "s", "the sum of z", "sum", grows=True
    ),
    "mean": Statistic(
        "torch.mean(z, AXIS)", (("s", SUM[0], SUM[1].format("z"), SUM[2]),), "s / n", "the mean of z", "mean"
    ),
    "max": Statistic(
        "torch.amax(z, AXIS)",
        (("m", 'float("-inf")', 'tl.max(tl.where(inside, z, float("-inf")), 0)', "tl.maximum({0}, {1})"),),
        "m",
        "the largest z",
        "max",
    ),
    "min": Statistic(
        "torch.amin(z, AXIS)",
        (("m", 'float("inf")', 'tl.min(tl.where(inside, z, float("inf")), 0)', "tl.minimum({0}, {1})"),),
        "m",
        "the smallest z",
        "min",
    ),
    "rms": Statistic(
        "torch.sqrt(torch.mean(torch.square(z), AXIS) + 1e-6)",
        (("s", SUM[0], SUM[1].format("z * z"), SUM[2]),),
        "tl.sqrt_rn(s / n + 1e-6)",
        "sqrt((mean of z^2) + 1e-6)",
        "rms",
        2,
    ),
    "l1": Statistic(
        "torch.mean(torch.abs(z), AXIS)",
        (("s", SUM[0], SUM[1].format("tl.abs(z)"), SUM[2]),),
        "s / n",
        "the mean of |z|",
        "meanabs",
        2,
    ),
    "variance": Statistic(
        "torch.var(z, AXIS, correction=0)",
        (("s", SUM[0], SUM[1].format("z"), SUM[2]), ("q", SUM[0], SUM[1].format("(z - s / n) * (z - s / n)"), SUM[2])),
        "q / n",
        "the variance of z (divided by N, not N - 1)",
        "var",
        4,
    ),
    "logsumexp": Statistic(
        "torch.logsumexp(z, AXIS)",
        (
            ("m", 'float("-inf")', 'tl.max(tl.where(inside, z, float("-inf")), 0)', "tl.maximum({0}, {1})"),
            ("s", SUM[0], SUM[1].format("tl.exp(z - m)"), SUM[2]),
        ),
        "m + tl.log(s)",
        "log(sum of exp(z))",
        "logsumexp",
        4,
    ),
}
AXES = {"last": ("* N", -1, "the last axis"), "first": ("N C", 0, "the first axis"), "middle": ("B N C", 1, "axis 1")}
"""Which axis is reduced: the axes of the tensors, its number, its name."""
CASES = {
    "last": (
        'Case({"*": (33,), "N": 65})',
        'Case({"*": (8, 5), "N": 130}, draw=Outlier())',
        'Case({"*": (3,), "N": 2053})',
        'Case({"*": (), "N": 40})',
        'Case({"*": (31,), "N": 17}, layouts={"FIRST": "transposed"})',
        'Case({"*": (5, 6), "N": 33}, layouts={"LAST": "strided"})',
        'Case({"*": (0,), "N": 5})',
        'Case({"*": (7,), "N": 1})',
        'Case({"*": (3, 5), "N": 211}, held=True)',
    ),
    "first": (
        'Case({"N": 65, "C": 33})',
        'Case({"N": 130, "C": 40}, draw=Outlier())',
        'Case({"N": 2053, "C": 3})',
        'Case({"N": 31, "C": 17}, layouts={"FIRST": "transposed"})',
        'Case({"N": 33, "C": 30}, layouts={"LAST": "strided"})',
        'Case({"N": 5, "C": 0})',
        'Case({"N": 1, "C": 7})',
        'Case({"N": 211, "C": 15}, held=True)',
    ),
    "middle": (
        'Case({"B": 3, "N": 65, "C": 11})',
        'Case({"B": 2, "N": 130, "C": 9}, draw=Outlier())',
        'Case({"B": 1, "N": 2053, "C": 3})',
        'Case({"B": 4, "N": 31, "C": 6}, layouts={"FIRST": "transposed"})',
        'Case({"B": 5, "N": 33, "C": 4}, layouts={"LAST": "strided"})',
        'Case({"B": 0, "N": 5, "C": 2})',
        'Case({"B": 7, "N": 1, "C": 3})',
        'Case({"B": 3, "N": 211, "C": 5}, held=True)',
    ),
}
VARIED = {
    "last": (
        'sizes(lambda p: {"*": p.shape(2, 3, 30), "N": p.whole(2, 60)})',
        'sizes(lambda p: {"*": (p.whole(1, 3),), "N": p.whole(4300, 4500)})',
    ),
    "first": (
        'sizes(lambda p: {"N": p.whole(2, 60), "C": p.whole(2, 30)})',
        'sizes(lambda p: {"N": p.whole(4300, 4500), "C": p.whole(1, 3)})',
    ),
    "middle": (
        'sizes(lambda p: {"B": p.whole(1, 4), "N": p.whole(2, 60), "C": p.whole(2, 9)})',
        'sizes(lambda p: {"B": 1, "N": p.whole(4300, 4500), "C": p.whole(1, 3)})',
    ),
}
TIMED = {
    "last": 'tuple(Case({"*": (b,), "N": n}) for b, n in ((16384, 1024), (8192, 4096), (8192, 8192)))',
    "first": 'tuple(Case({"N": n, "C": c}) for n, c in ((1024, 16384), (4096, 8192), (8192, 8192)))',
    "middle": 'tuple(Case({"B": b, "N": n, "C": c}) for b, n, c in ((16, 1024, 1024), (16, 2048, 1024), (32, 2048, 1024)))',
}


@dataclass(frozen=True)
class Row:
    """The values z of a row, as an expression of tensors, and where the row lies.

    Attributes:
        tensors: the tensors of the expression.
        tree: the expression.
        axis: key of ``AXES``.
        dtype: of all tensors.
    """

    tensors: tuple[str, ...]
    tree: Node
    axis: str
    dtype: str

    def passes(self, statistics: str, used: str = "stat") -> str:
        """Return the passes over a row that compute a statistic, as statements of a kernel.

        Args:
            statistics: name in ``STATISTICS``.
            used: statements that need the statistic ``stat``, or only the numbers of some passes.

        Returns:
            The statements; afterwards ``stat`` is the number, if it is needed.
        """
        found, names = STATISTICS[statistics], set(re.findall(r"[A-Za-z_]\w*", used))
        needed = [k for k, p in enumerate(found.passes) if p[0] in names or "stat" in names]
        lines = []
        for name, start, add, join in found.passes[: max(needed, default=-1) + 1]:
            lines += [f"{name} = {start}", "for k0 in range(0, n, BLOCK):"]
            lines += [f"    {line}" for line in self.values()]
            lines += [f"    {name} = {join.format(name, add)}"]
        return text.indented([*lines, *([f"stat = {found.result}"] if "stat" in names else [])])

    def values(self) -> list[str]:
        """Return the statements that load a block of a row and compute ``z``."""
        lines = statements(self.tree)
        loads = text.loads(self.tensors, "base + at")
        return ["at = k0 + tl.arange(0, BLOCK)", "inside = at < n", *loads, *lines.body, f"z = {lines.result}"]

    def dense(self, *more: str) -> str:
        """Return host statements that bring tensors into rows that are contiguous."""
        d = AXES[self.axis][1]
        names = (*self.tensors, *more)
        if self.axis == "last":
            return text.indented(text.contiguous(names))
        return text.indented([f"{t} = {t}.movedim({d}, -1).contiguous()" for t in names])

    def about(self, words: str) -> str:
        """Return words about the values z; where these are those of a plain tensor, its name stands for z."""
        return words if self.tree.op else re.sub(r"\bz\b", self.tensors[0], words)

    def arithmetic(self, voice: Voice, overflows: bool) -> str:
        """Return the sentences about precision; ``overflows`` tells whether exp of large values could overflow."""
        return voice.rounding(self.dtype) + (" Large values must not overflow." if overflows else "")

    @property
    def shape(self) -> str:
        """The shape in the words of a contract."""
        return {"last": "(*, N)", "first": "(N, C)", "middle": "(B, N, C)"}[self.axis]

    def takes(self) -> dict[str, str]:
        """Return the declarations of the tensors, as Python."""
        return {t: f'T("{AXES[self.axis][0]}", "{self.dtype}")' for t in self.tensors}

    def fields(
        self, flops: int, takes: Mapping[str, str], ulps: int = 16, reads: str = "", least: int = 1
    ) -> dict[str, str]:
        """Return the arguments of ``@task``.

        Args:
            flops: of the plain algorithm, for each element.
            takes: the declarations of all tensors.
            ulps: of the criterion.
            reads: further text of ``Cost``.
            least: least length of a row.

        Returns:
            Python text by name.
        """
        first, last = self.tensors[0], self.tensors[-1]
        cases = [
            c.replace("FIRST", first).replace("LAST", last)
            for c in CASES[self.axis]
            if '"N": 1' + "}" not in c or least == 1
        ]
        cases = [c for c in cases if '"N": 1,' not in c or least == 1]
        return {
            "takes": text.mapping(takes),
            "truth": f"Close(ulps={ulps})",
            "cost": f'Cost(flops="{flops} * numel({first})", least="numel({first})"{reads})',
            "cases": text.block(cases),
            "varied": text.block(VARIED[self.axis]),
            "timed": TIMED[self.axis],
        }

    def example(self, rng: random.Random) -> str:
        """Return the tensors of an example, as Python writes them."""
        inner = [text.matrix(rng) for _ in self.tensors]
        return ", ".join(f"[{i}]" if self.axis == "middle" else i for i in inner)


def draw_row(
    rng: random.Random, operations: int, count: int, *, smooth: bool = False, axis: str = "", largest: float = 2e4
) -> Row:
    """Draw the values of a row.

    Args:
        rng: makes the choices.
        operations: of the expression; 0 for a plain tensor.
        count: of the tensors.
        smooth: with continuous derivatives only.
        axis: which axis is the row; by default any.
        largest: bound on all values.

    Returns:
        The row.
    """
    names = rng.choice((("x", "y"), ("input", "other"), ("hidden", "residual"), ("a", "b")))[:count]
    leaves = [leaf(n) for n in names]
    tree = (
        leaves[0]
        if not operations and count == 1
        else draw(rng, leaves, max(operations, count - 1), smooth=smooth, largest=largest)
    )
    return Row(names, tree, axis or rng.choice(("last", "last", "first", "middle")), choose_dtype(rng))


def span_of(row: Row, statistics: str) -> Interval:
    """Return about the interval of a statistic of a row; its sign is right.

    Args:
        row: the values.
        statistics: name in ``STATISTICS``; empty for the values themselves.

    Returns:
        At most 60, or 4000 for a variance.
    """
    low, high = row.tree.bounds()
    if statistics in ("rms", "l1", "absmax"):
        low, high = 0.0, max(abs(low), abs(high))
    elif statistics == "variance":
        return 0.0, 4000.0
    elif statistics in ("logsumexp", "sum"):
        return -60.0, 60.0
    low, high = max(low, -60.0), min(high, 60.0)
    return (low, high) if low < high else (-60.0, 60.0)


def said(row: Row, voice: Voice, more: str = "", result: str = "", least: int = 1) -> str:
    """Return the sentences of a contract about shapes, dtypes and results; rows have at least ``least`` elements."""
    one = len(row.tensors) == 1
    group = " (* is any number of axes, also none)" if row.axis == "last" else ""
    return " ".join(
        filter(
            None,
            (
                voice.one(
                    f"{listed(row.tensors)} {'has' if one else 'have'} shape {row.shape}{group} and dtype "
                    f"{voice.dtype(row.dtype)}.",
                    f"{listed(row.tensors)}: {voice.dtype(row.dtype)} {'tensor' if one else 'tensors'} of shape "
                    f"{row.shape}{group}.",
                ),
                more,
                result,
                f"N is at least {least}; the sizes of other axes may be 0 (empty tensors).",
            ),
        )
    )


REDUCE = """@triton.jit
def _kernel({pointers}, out, n, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    base = row * n
{passes}
{after}
    tl.store(out + row, {result}.to(out.dtype.element_ty))


def ENTRY({parameters}):
{dense}
    n = {first}.shape[-1]
    out = torch.empty({first}.shape[:-1], dtype={first}.dtype, device={first}.device)
    if out.numel():
        BLOCK = min(4096, triton.next_power_of_2(n))
        _kernel[(out.numel(),)]({tensors}, out, n, BLOCK=BLOCK, num_warps=8 if BLOCK > 1024 else 4)
    return {returned}
"""


def reduce(rng: random.Random, level: int) -> Draft:
    """Draw a reduction of an expression over one axis, with elementwise work on the result."""
    voice = Voice(rng)
    name = rng.choice(DRAWN)
    stat = STATISTICS[name]
    least = 2 if name in EXACT else 1
    largest = 60.0 if name == "logsumexp" else 400.0 if stat.grows or name == "variance" else 2e4
    row = draw_row(
        rng, rng.randint(max(0, level - 2), 2 * level - 1), 1 + (rng.random() < 0.4 and level > 1), largest=largest
    )
    behind = None
    if level > 1 and rng.random() < 0.7 and not stat.grows:
        behind = draw(rng, [leaf("r", span_of(row, name))], rng.randint(1, 2), largest=2e4)
    keep = rng.random() < 0.3
    d = AXES[row.axis][1]
    torch_stat = stat.torch.replace("AXIS", f"{d}, keepdim=True" if keep else str(d))
    body = [
        f"z = {row.tree.written('torch')}",
        f"r = {torch_stat}",
        f"return {behind.written('torch')}" if behind else "return r",
    ]
    lines = statements(behind, {"r": "stat"}) if behind else None
    code = row.passes(name)
    after = text.indented(lines.body) if lines else ""
    tail = "out.unsqueeze(-1)" if keep else "out"
    if keep and row.axis != "last":
        tail = f"out.unsqueeze({d})"
    expert = head(code + after) + REDUCE.format(
        pointers=text.pointers(row.tensors),
        passes=code,
        after=after,
        result=lines.result if lines else "stat",
        parameters=", ".join(row.tensors),
        dense=row.dense(),
        first=row.tensors[0],
        tensors=", ".join(row.tensors),
        returned=tail,
    )
    where = f"With z = {formula(row.tree)}, r" if row.tree.op else "r"
    number, over = row.about(stat.text), AXES[row.axis][2]
    result = formula(behind) if behind else "r"
    summary = voice.one(
        f"{where} is {number} over {over}; the result is {result}.",
        f"Reduce z = {formula(row.tree)} over {over}: r = {number}, and return {result}."
        if row.tree.op
        else f"Reduce {row.tensors[0]} over {over}: r = {number}, and return {result}.",
    )
    axis = "stays with length 1" if keep else "is removed"
    details = (
        voice.where(meanings(row.tree, behind)),
        said(
            row,
            voice,
            result=voice.one(
                f"In the result, a new tensor of the same dtype, {AXES[row.axis][2]} {axis}.",
                f"The result is a new tensor of the same dtype, in which {AXES[row.axis][2]} {axis}.",
            ),
            least=least,
        ),
        voice.closing(row.arithmetic(voice, name == "logsumexp"), row.tensors),
    )
    flops = row.tree.flops() + stat.flops
    size = row.tree.count() + 2 + (behind.count() if behind else 0)
    return Draft(
        family="reduce",
        category="reduce",
        words=(*row.tree.words()[:2], stat.word, *(behind.words()[:1] if behind else ())),
        parameters=", ".join(row.tensors),
        body=tuple(body),
        summary=summary,
        details=details,
        examples=(row.example(rng),),
        takes=dict.fromkeys(row.tensors, row.dtype),
        fields=row.fields(flops, row.takes(), least=least),
        expert=expert,
        size=size,
        imports=("from kbx_env.tasks._varied import sizes",),
    )


WHOLE = """@triton.jit
def _kernel({pointers}, out, n, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    base = row * n
{passes}
    for k0 in range(0, n, BLOCK):
{values}
{after}
        tl.store(out + base + at, {result}.to(out.dtype.element_ty), mask=inside)


def ENTRY({parameters}):
{dense}
    n = {first}.shape[-1]
    out = torch.empty({first}.shape, dtype={first}.dtype, device={first}.device)
    if out.numel():
        BLOCK = min(4096, triton.next_power_of_2(n))
        _kernel[(out.numel() // n,)]({tensors}, out, n, BLOCK=BLOCK, num_warps=8 if BLOCK > 1024 else 4)
    return {returned}
"""
NORMS: Mapping[str, tuple[str, str, str, str]] = {
    "softmax": ("torch.softmax(z, AXIS)", "tl.exp(z - m) / stat", "exp(z) / sum(exp(z))", "softmax"),
    "log_softmax": ("torch.log_softmax(z, AXIS)", "z - m - stat", "z - log(sum(exp(z)))", "log_softmax"),
    "rms_norm": (
        "z / torch.sqrt(torch.mean(torch.square(z), AXIS, keepdim=True) + 1e-6)",
        "z / stat",
        "z / sqrt(mean(z^2) + 1e-6)",
        "rms_norm",
    ),
    "layer_norm": (
        "(z - torch.mean(z, AXIS, keepdim=True)) / torch.sqrt(torch.var(z, AXIS, correction=0, keepdim=True) + 1e-5)",
        "(z - s / n) / tl.sqrt_rn(stat + 1e-5)",
        "(z - mean(z)) / sqrt(var(z) + 1e-5)",
        "layer_norm",
    ),
    "center": ("z - torch.mean(z, AXIS, keepdim=True)", "z - stat", "z - mean(z)", "center"),
    "max_scale": (
        "z / (torch.amax(torch.abs(z), AXIS, keepdim=True) + 1e-3)",
        "z / (stat + 1e-3)",
        "z / (max(|z|) + 0.001)",
        "absmax_scale",
    ),
}
"""Functions that keep the shape: in torch, in Triton from z and its statistic, as a formula, and in names."""
OVER = {
    "softmax": "the sum",
    "log_softmax": "the sum",
    "rms_norm": "the mean",
    "layer_norm": "the mean and the variance (divided by N, not N - 1)",
    "center": "the mean",
    "max_scale": "the maximum",
}
"""What a function of ``NORMS`` takes over the row."""
STAT_OF = {
    "softmax": "sumexp",
    "log_softmax": "logsum",
    "rms_norm": "rms",
    "layer_norm": "variance",
    "center": "mean",
    "max_scale": "absmax",
}
ABSMAX = Statistic(
    "torch.amax(torch.abs(z), AXIS)",
    (("m", "0.0", "tl.max(tl.where(inside, tl.abs(z), 0.0), 0)", "tl.maximum({0}, {1})"),),
    "m",
    "the largest |z|",
    "absmax",
    2,
)
DRAWN = (*STATISTICS, "absmax")
"""Statistics that a reduction is made of."""
# exp(z - m) / s, not exp(z - (m + log(s))): rounding m + log(s) costs as many units as its size.
STATISTICS = {
    **STATISTICS,
    "absmax": ABSMAX,
    "sumexp": replace(STATISTICS["logsumexp"], result="s"),
    "logsum": replace(STATISTICS["logsumexp"], result="tl.log(s)"),
}
SPANS: Mapping[str, Interval] = {
    "softmax": (0.0, 1.0),
    "log_softmax": (-130.0, 0.0),
    "max_scale": (-1.0, 1.0),
}
"""Interval of a function in ``NORMS`` without weights, where its sign is known."""
EXACT = ("variance",)
"""Statistics that are exactly zero in a row of one element, as their gradients are. A kernel need not get zero there:
the device rounds a product and a difference once, so that ``z - z`` is the rounding error of z. No error is right there.
"""


def normalized(rng: random.Random, level: int, kind: str) -> Draft:
    """Draw a softmax or norm of an expression, with elementwise work behind that may use vectors."""
    voice = Voice(rng)
    torch_text, triton_text, p_text, word = NORMS[kind]
    stat = STAT_OF[kind]
    # In a row of one element these are exactly zero, where any rounding error is infinitely wrong.
    least = 2 if kind in ("log_softmax", "center", "layer_norm") else 1
    affine = kind in ("rms_norm", "layer_norm") and rng.random() < 0.6
    axis = "last" if affine else ""
    largest = 60.0 if "softmax" in kind else 400.0
    row = draw_row(
        rng, rng.randint(0, max(0, 2 * level - 3)), 1 + (rng.random() < 0.4 and level > 1), largest=largest, axis=axis
    )
    behind: Node | None = None
    gate: tuple[str, ...] = ()
    if level > 2:
        gate = ("gate",) if rng.random() < 0.5 else ()
        behind = draw(
            rng,
            [leaf("p", SPANS.get(kind, (-30.0, 30.0))), *(leaf(g) for g in gate)],
            rng.randint(max(1, len(gate)), 2 + len(gate)),
        )
    d = AXES[row.axis][1]
    vectors = (("weight", "bias") if rng.random() < 0.6 else ("weight",)) if affine else ()
    p_torch = torch_text.replace("AXIS", str(d))
    if vectors:
        p_torch = f"({p_torch}) * weight" + (" + bias" if "bias" in vectors else "")
    body = (
        f"z = {row.tree.written('torch')}",
        f"p = {p_torch}",
        f"return {behind.written('torch')}" if behind else "return p",
    )
    lines = statements(behind, prefix="w") if behind else None
    loads = [*text.loads(vectors, "at"), *text.loads(gate, "base + at")]
    p_line = f"p = {triton_text}"
    if vectors:
        p_line = f"p = ({triton_text}) * weight" + (" + bias" if "bias" in vectors else "")
    after = [*loads, p_line, *(lines.body if lines else ())]
    names = (*row.tensors, *vectors, *gate)
    code = row.passes(stat)
    returned = "out" if row.axis == "last" else f"out.movedim(-1, {d})"
    dense = row.dense(*gate) + ("\n" + text.indented(text.contiguous(vectors)) if vectors else "")
    expert = head(code + "\n".join(after) + "\n".join(row.values())) + WHOLE.format(
        pointers=text.pointers(names),
        passes=code,
        values=text.indented(row.values(), 2),
        after=text.indented(after, 2),
        result=lines.result if lines else "p",
        parameters=", ".join(names),
        dense=dense,
        first=row.tensors[0],
        tensors=", ".join(names),
        returned=returned,
    )
    given = f"For z = {formula(row.tree)}: " if row.tree.op else ""
    do, result = ("return", "the result is") if given else ("Return", "The result is")
    value = row.about(p_text) + "".join(f" {sign} {v}" for sign, v in zip("*+", vectors))
    over = f"with {OVER[kind]} over {AXES[row.axis][2]}"
    summary = given + (
        voice.one(
            f"p = {value}, {over}; the result is {formula(behind)}.",
            f"{do} {formula(behind)}, where p = {value}, {over}.",
        )
        if behind
        else voice.one(f"{do} {value}, {over}.", f"{result} {value}, {over}.")
    )
    more = (
        f"{listed(vectors)} {'has' if len(vectors) == 1 else 'have'} shape (N,) and the same dtype." if vectors else ""
    )
    more += f" {gate[0]} has the shape and dtype of {row.tensors[0]}." if gate else ""
    details = (
        voice.where(meanings(row.tree, behind)),
        said(
            row,
            voice,
            more.strip(),
            voice.one(
                f"The result is a new tensor with the shape and dtype of {row.tensors[0]}.",
                f"A new tensor with {row.tensors[0]}'s shape and dtype is returned.",
            ),
            least,
        ),
        voice.closing(row.arithmetic(voice, "softmax" in kind), names),
    )
    takes = (
        row.takes()
        | {v: f'T("N", "{row.dtype}")' for v in vectors}
        | {g: f'T("{AXES[row.axis][0]}", "{row.dtype}")' for g in gate}
    )
    flops = row.tree.flops() + STATISTICS[stat].flops + 4 + (behind.flops() if behind else 0)
    example = ", ".join([row.example(rng), *(text.vector(rng) for _ in vectors)])
    if gate:
        example += ", " + Row(gate, leaf(gate[0]), row.axis, row.dtype).example(rng)
    return Draft(
        family=kind_family(kind),
        category="math" if "softmax" in kind else "normalization",
        words=(*row.tree.words()[:2], word, *(behind.words()[:2] if behind else ())),
        parameters=", ".join(names),
        body=body,
        summary=summary,
        details=details,
        examples=(example,),
        takes=dict.fromkeys(names, row.dtype),
        fields=row.fields(flops, takes, 32, least=least),
        expert=expert,
        size=row.tree.count() + 3 + len(vectors) + (behind.count() if behind else 0),
        imports=("from kbx_env.tasks._varied import sizes",),
    )


def kind_family(kind: str) -> str:
    """Return the family of a function in ``NORMS``."""
    return "softmax" if "softmax" in kind else "norm"


def softmax(rng: random.Random, level: int) -> Draft:
    """Draw a softmax or its logarithm."""
    return normalized(rng, level, rng.choice(("softmax", "log_softmax")))


def norm(rng: random.Random, level: int) -> Draft:
    """Draw a norm."""
    return normalized(rng, level, rng.choice(("rms_norm", "layer_norm", "center", "max_scale")))


FAMILIES = {"reduce": reduce, "softmax": softmax, "norm": norm}
