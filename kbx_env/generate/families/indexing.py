"""Gathers: rows of a table (``embedding``), and one element of every row (``pick``), with elementwise work around."""

from __future__ import annotations

import random

from kbx_env.generate import text
from kbx_env.generate.drafts import Draft, Voice, listed
from kbx_env.generate.expressions import draw, formula, head, leaf, meanings, statements
from kbx_env.generate.families.elementwise import choose_dtype
from kbx_env.generate.families.rows import STATISTICS, draw_row, span_of

EMBEDDING = """@triton.jit
def _kernel({pointers}, p_index, out, columns, n, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    row, column = at // columns, at % columns
    place = tl.load(p_index + row, mask=inside, other=0)
    e = tl.load(p_table + place * columns + column, mask=inside, other=0.0).to(tl.float32)
{loads}
{body}
    tl.store(out + at, {result}.to(out.dtype.element_ty), mask=inside)


def ENTRY({parameters}):
{dense}
    index = index.contiguous()
    columns = table.shape[1]
    out = torch.empty((index.shape[0], columns), dtype=table.dtype, device=table.device)
    n = out.numel()
    if n:
        _kernel[(triton.cdiv(n, 1024),)]({tensors}, index, out, columns, n, BLOCK=1024, num_warps=4)
    return out
"""


def embedding(rng: random.Random, level: int) -> Draft:
    """Draw a lookup of rows of a table, combined elementwise with other tensors."""
    voice = Voice(rng)
    dtype = choose_dtype(rng)
    other = {0: (), 1: ("bias",), 2: ("x",), 3: ("x", "bias")}[rng.randint(0, min(3, level))]
    tree = draw(rng, [leaf("e"), *(leaf(o) for o in other)], max(len(other), 3 * level - 2))
    names = ("table", *other)
    place = {"bias": "column", "x": "at"}
    lines = statements(tree)
    parameters = ", ".join(["table", "index", *other])
    expert = head("\n".join(lines.body)) + EMBEDDING.format(
        pointers=text.pointers(names),
        loads=text.indented([line for o in other for line in text.loads([o], place[o])]),
        body=text.indented(lines.body),
        result=lines.result,
        parameters=parameters,
        dense=text.indented(text.contiguous(names)),
        tensors=", ".join(names),
    )
    shapes = {"table": "(V, C)", "x": "(B, C)", "bias": "(C,)"}
    summary = voice.one(
        f"Look up e = table[index], the rows of table at index, and return {formula(tree)}.",
        f"{formula(tree)}, where e[i] = table[index[i]] is a row of table.",
    )
    details = (
        voice.where(tree.meanings()),
        f"Shapes: {listed([f'{n} {shapes[n]}' for n in names])}{', all' if other else ''} of dtype {voice.dtype(dtype)}; "
        f"index (B,) is int64 with values in [0, V), which may repeat and come in any order. The result is a new tensor of "
        f"shape (B, C) and the same dtype.",
        voice.closing(voice.rounding(dtype), ("table", "index", *other), "B may be 0 (empty tensors)."),
    )
    axes = {"table": "V C", "x": "B C", "bias": "C"}
    takes = {"table": f'T("V C", "{dtype}")', "index": 'T("B", "i64", Ints(0, "V"))'}
    takes |= {o: f'T("{axes[o]}", "{dtype}")' for o in other}
    cases = (
        'Case({"V": 50, "C": 33, "B": 40})',
        'Case({"V": 300, "C": 130, "B": 65}, draw=Outlier())',
        'Case({"V": 7, "C": 1025, "B": 9})',
        'Case({"V": 1, "C": 5, "B": 3})',
        'Case({"V": 33, "C": 65, "B": 11}, layouts={"table": "transposed"})',
        f'Case({{"V": 20, "C": 31, "B": 17}}, layouts={{"{names[-1]}": "strided", "index": "strided"}})',
        'Case({"V": 5, "C": 7, "B": 0})',
        'Case({"V": 211, "C": 67, "B": 90}, held=True)',
    )
    reads = 'reads={"table": "distinct(index) * C"}'
    fields = {
        "takes": text.mapping(takes),
        "truth": "Close(ulps=16)",
        "cost": f'Cost(flops="{tree.flops()} * B * C", least="B * C", {reads})',
        "cases": text.block(cases),
        "varied": text.block(
            (
                'sizes(lambda p: {"V": p.whole(2, 60), "C": p.whole(2, 40), "B": p.whole(1, 50)})',
                'sizes(lambda p: {"V": p.whole(2, 9), "C": p.whole(1100, 1300), "B": p.whole(1, 4)})',
            )
        ),
        "timed": 'tuple(\n        Case({"V": v, "C": c, "B": b})\n        for v, c, b in ((32768, 1024, 8192), '
        "(65536, 1024, 32768), (131072, 2048, 32768))\n    )",
    }
    rows = text.matrix(rng, 3)
    shown = {"x": text.matrix(rng), "bias": text.vector(rng)}
    return Draft(
        family="embedding",
        category="index",
        words=("embedding", *tree.words()[:3]),
        parameters=parameters,
        body=("e = table[index]", f"return {tree.written('torch')}"),
        summary=summary,
        details=details,
        examples=(", ".join([rows, "[2, 0]", *(shown[o] for o in other)]),),
        takes=dict.fromkeys(names, dtype) | {"index": "i64"},
        fields=fields,
        expert=expert,
        size=tree.count() + 1,
        imports=("from kbx_env.tasks._varied import sizes",),
    )


PICK = """@triton.jit
def _kernel({pointers}, p_target, out, n, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    base = row * n
{passes}
    at = tl.load(p_target + row)
{loads}
{body}
    t = {value}
{after}
    tl.store(out + row, {result}.to(out.dtype.element_ty))


def ENTRY({parameters}):
{dense}
    target = target.contiguous()
    n = {first}.shape[-1]
    out = torch.empty({first}.shape[:-1], dtype={first}.dtype, device={first}.device)
    if out.numel():
        BLOCK = min(4096, triton.next_power_of_2(n))
        _kernel[(out.numel(),)]({tensors}, target, out, n, BLOCK=BLOCK, num_warps=8 if BLOCK > 1024 else 4)
    return out
"""


def pick(rng: random.Random, level: int) -> Draft:
    """Draw a loss of every row: a statistic of the row combined with its element at a target position."""
    # Rows have at least two elements: with one, r - t is exactly zero, and no rounding error is right (``rows.EXACT``).
    voice = Voice(rng)
    name = rng.choice(("logsumexp", "logsumexp", "max", "mean", "rms"))
    stat = STATISTICS[name]
    row = draw_row(rng, rng.randint(0, 2 * level - 1), 1 + (level > 2), axis="last", largest=60.0)
    tree = draw(rng, [leaf("r", span_of(row, name)), leaf("t", span_of(row, ""))], max(1, level - 1))
    lines, own = statements(tree, {"r": "stat"}, "w"), statements(row.tree)
    loads = text.loads(row.tensors, "base + at", mask=False)
    code = row.passes(name)
    parameters = ", ".join([*row.tensors, "target"])
    expert = head(code + "\n".join([*lines.body, *own.body])) + PICK.format(
        pointers=text.pointers(row.tensors),
        passes=code,
        loads=text.indented(loads),
        body=text.indented(own.body),
        value=own.result,
        after=text.indented(lines.body),
        result=lines.result,
        parameters=parameters,
        dense=row.dense(),
        first=row.tensors[0],
        tensors=", ".join(row.tensors),
    )
    rows = f"row of z = {formula(row.tree)}" if row.tree.op else f"row z of {row.tensors[0]}"
    summary = voice.one(
        f"For each {rows}, return {formula(tree)}, where r is {stat.text} over the row, and t = z[target] is the row's element at "
        f"its target.",
        f"For every {rows}, let r be {stat.text} over the row, and t = z[target] the element at its target; return "
        f"{formula(tree)}.",
    )
    details = (
        voice.where(meanings(row.tree, tree)),
        f"{listed(row.tensors)}: {voice.dtype(row.dtype)}, shape (B, N); target: int64, shape (B,), with values in "
        f"[0, N). The result is a new "
        f"tensor of shape (B,) and {row.tensors[0]}'s dtype. N is at least 2, B may be 0 (empty tensors).",
        voice.closing(row.arithmetic(voice, name == "logsumexp"), (*row.tensors, "target")),
    )
    first = row.tensors[0]
    cases = (
        'Case({"B": 33, "N": 65})',
        'Case({"B": 40, "N": 130}, draw=Outlier())',
        'Case({"B": 3, "N": 2053})',
        'Case({"B": 7, "N": 2})',
        f'Case({{"B": 31, "N": 17}}, layouts={{"{first}": "transposed"}})',
        f'Case({{"B": 20, "N": 33}}, layouts={{"{row.tensors[-1]}": "strided", "target": "strided"}})',
        'Case({"B": 0, "N": 5})',
        'Case({"B": 15, "N": 211}, held=True)',
    )
    takes = {t: f'T("B N", "{row.dtype}")' for t in row.tensors} | {"target": 'T("B", "i64", Ints(0, "N"))'}
    fields = {
        "takes": text.mapping(takes),
        "truth": "Close(ulps=16)",
        "cost": f'Cost(flops="{row.tree.flops() + stat.flops} * numel({first})", least="numel({first})")',
        "cases": text.block(cases),
        "varied": text.block(
            (
                'sizes(lambda p: {"B": p.whole(2, 40), "N": p.whole(2, 60)})',
                'sizes(lambda p: {"B": p.whole(1, 3), "N": p.whole(4300, 4500)})',
            )
        ),
        "timed": 'tuple(Case({"B": b, "N": n}) for b, n in ((16384, 1024), (8192, 8192), (8192, 32768)))',
    }
    at = "z.gather(-1, target.unsqueeze(-1)).squeeze(-1)"
    return Draft(
        family="pick",
        category="loss",
        words=("picked", *row.tree.words()[:1], stat.word, *tree.words()[:2]),
        parameters=parameters,
        body=(
            f"z = {row.tree.written('torch')}",
            f"r = {stat.torch.replace('AXIS', '-1')}",
            f"t = {at}",
            f"return {tree.written('torch')}",
        ),
        summary=summary,
        details=details,
        examples=(row.example(rng) + ", [2, 0]",),
        takes=dict.fromkeys(row.tensors, row.dtype) | {"target": "i64"},
        fields=fields,
        expert=expert,
        size=row.tree.count() + tree.count() + 3,
        imports=("from kbx_env.tasks._varied import sizes",),
    )


FAMILIES = {"embedding": embedding, "pick": pick}
