"""Gradients of compositions: the reference differentiates by autograd, the kernel by formulas that are composed as well.

The exact answer is autograd in fp64. Only operations with continuous derivatives are used: where a derivative jumps, a
rounding error decides, and no tolerance is right.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from kbx_env.generate import text
from kbx_env.generate.drafts import Draft, Voice, listed
from kbx_env.generate.expressions import adjoints, draw, formula, head, leaf, live, statements, unread
from kbx_env.generate.families.elementwise import NAMES, choose_dtype
from kbx_env.generate.families.rows import AXES, EXACT, NORMS, OVER, STATISTICS, Row, draw_row, said


def _reference(names: Sequence[str], forward: str) -> tuple[tuple[str, ...], str]:
    """Return the statements of the reference, and the function that it differentiates.

    Args:
        names: of the tensors.
        forward: statements of the function, ending with ``return``.

    Returns:
        Statements, and the source of ``_forward``.
    """
    helper = f"def _forward({', '.join(names)}):\n" + "".join(f"    {line}\n" for line in forward.splitlines())
    grads = "torch.autograd.grad(result, leaves, grad_output)"
    body = (
        "with torch.enable_grad():",
        f"    leaves = [t.detach().requires_grad_() for t in ({', '.join(names)},)]",
        "    result = _forward(*leaves)",
        f"return {grads}[0]" if len(names) == 1 else f"return {grads}",
    )
    return body, helper


def _wanted(names: Sequence[str]) -> str:
    """Return what a backward pass computes, in words."""
    return f"the gradient{'s' if len(names) > 1 else ''} of the loss with respect to {listed(names)}"


def _gradients(names: Sequence[str], voice: Voice) -> str:
    """Return what the contract says about the results."""
    if len(names) == 1:
        return f"The result is a new tensor: the gradient with respect to {names[0]}, with its shape and dtype."
    return voice.one(
        f"The result is the tuple of the gradients with respect to {listed(names)}, in this order; each is a new tensor "
        f"with the shape and dtype of its input.",
        f"Return a tuple with the gradient of each of {listed(names)}, in this order; each is a new tensor with that "
        f"tensor's shape and dtype.",
    )


def _reads(reads: Mapping[str, str]) -> str:
    """Return the argument of ``Cost`` for tensors that need not be read."""
    return f", reads={dict(reads)!r}".replace("'", '"') if reads else ""


KERNEL = """@triton.jit
def _kernel({pointers}, p_grad, {outs}, n, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    upstream = tl.load(p_grad + at, mask=inside, other=0.0).to(tl.float32)
{body}
{stores}


def ENTRY({parameters}):
{dense}
    grad_output = grad_output.contiguous()
    {outs} = {empty}
    n = grad_output.numel()
    if n:
        _kernel[(triton.cdiv(n, 1024),)]({tensors}, grad_output, {outs}, n, BLOCK=1024, num_warps=4)
    return {outs}
"""


def pointwise(rng: random.Random, level: int) -> Draft:
    """Draw the gradient of an elementwise expression."""
    voice = Voice(rng)
    count = rng.randint(1, min(3, level))
    names = rng.choice(NAMES)[:count]
    tree = draw(
        rng, [leaf(n) for n in names], max(count, 2 * level - 2 + rng.randint(0, 1)), smooth=True, largest=400.0
    )
    dtype = choose_dtype(rng)
    lines = statements(tree)
    back, grads = adjoints(tree, lines, "upstream")
    outs = [f"grad_{n}" for n in names]
    code = live([*text.loads(names, "at"), *lines.body, *back], grads.values())
    reads = unread(code, names)
    stores = text.stores({o: grads[n] for n, o in zip(names, outs, strict=True)}, "at")
    parameters = ", ".join([*names, "grad_output"])
    expert = head("\n".join(code)) + KERNEL.format(
        pointers=text.pointers(names),
        outs=", ".join(outs),
        body=text.indented(code),
        stores=text.indented(stores),
        parameters=parameters,
        dense=text.indented(text.contiguous(names)),
        empty=text.empty_like(names),
        tensors=", ".join(names),
    )
    body, helper = _reference(names, f"return {tree.written('torch')}")
    f = formula(tree)
    summary = voice.one(
        f"The backward pass of f = {f}, elementwise. grad_output is the gradient of a loss with respect to f; return "
        f"{_wanted(names)}.",
        f"Given grad_output, the gradient of a loss with respect to f = {f} (elementwise), return {_wanted(names)}.",
    )
    tensors = (*names, "grad_output")
    details = (
        voice.where(tree.meanings()),
        f"{listed(tensors)} are {voice.dtype(dtype)} tensors of one shape, of any rank. {_gradients(names, voice)}",
        voice.closing(voice.rounding(dtype, len(names)), tensors, voice.empty()),
    )
    fields = {
        "takes": text.mapping({t: f'T("*", "{dtype}")' for t in tensors}),
        "truth": "Close(ulps=16)",
        "cost": f'Cost(flops="{3 * tree.flops()} * numel(grad_output)", least="numel(grad_output)"'
        + _reads(reads)
        + ")",
        "cases": text.block(text.flat_cases(names[0], "grad_output")),
        "varied": "(elementwise(),)",
        "timed": text.flat_timed(dtype),
    }
    return Draft(
        family="backward_pointwise",
        category="activation" if count == 1 else "fusion",
        words=(*tree.words()[:3], "backward"),
        parameters=parameters,
        body=body,
        helpers=helper,
        summary=summary,
        details=details,
        examples=(", ".join(text.vector(rng) for _ in tensors),),
        takes=dict.fromkeys(tensors, dtype),
        fields=fields,
        expert=expert,
        size=2 * tree.count(),
        hard=1,
        imports=("from kbx_env.tasks._varied import elementwise",),
    )


ROWS = """@triton.jit
def _kernel({pointers}, p_grad, {outs}, n, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    base = row * n
{passes}
{upstream}
    for k0 in range(0, n, BLOCK):
{body}
{stores}


def ENTRY({parameters}):
{dense}
    n = {first}.shape[-1]
    {outs} = {empty}
    if {first}.numel():
        BLOCK = min(2048, triton.next_power_of_2(n))
        _kernel[({first}.numel() // n,)]({tensors}, grad_output, {outs}, n, BLOCK=BLOCK, num_warps=8 if BLOCK > 1024 else 4)
    return {returned}
"""
REDUCED: Mapping[str, str] = {
    "sum": "upstream",
    "mean": "upstream / n",
    "rms": "upstream * z / (n * stat)",
    "logsumexp": "upstream * (tl.exp(z - m) / s)",
    "variance": "upstream * 2.0 * (z - s / n) / n",
}
"""Derivative by z of a statistic, by its name, with the passes' numbers."""
NORMED: Mapping[str, tuple[str, tuple[tuple[str, str], ...], str]] = {
    "softmax": ("sumexp", (("dot", "upstream * (tl.exp(z - m) / stat)"),), "tl.exp(z - m) / stat * (upstream - dot)"),
    "log_softmax": ("sumexp", (("total", "upstream"),), "upstream - tl.exp(z - m) / stat * total"),
    "rms_norm": ("rms", (("dot", "upstream * z"),), "upstream / stat - z * dot / (n * stat * stat * stat)"),
    "layer_norm": (
        "variance",
        (("total", "upstream"), ("dot", "upstream * (z - s / n)")),
        "(upstream - total / n - (z - s / n) * dot / (n * (stat + 1e-5))) / tl.sqrt_rn(stat + 1e-5)",
    ),
    "center": ("mean", (("total", "upstream"),), "upstream - total / n"),
}
"""By function: its statistic, sums over the row that its derivative needs, and the derivative by z."""


def _row_draft(
    rng: random.Random,
    voice: Voice,
    row: Row,
    *,
    family: str,
    category: str,
    word: str,
    stat: str,
    sums: Sequence[tuple[str, str]],
    slope: str,
    forward: Sequence[str],
    said_as: str,
    reduced: bool,
) -> Draft:
    """Return the backward pass of a function of rows.

    Args:
        rng: makes the choices.
        voice: chooses the words.
        row: the values z.
        family: of the draft.
        category: of the draft.
        word: of the function.
        stat: its statistic.
        sums: sums over the row: name and summand.
        slope: the derivative by z.
        forward: statements of the function of z in torch.
        said_as: what the function is.
        reduced: whether the upstream gradient is one number for each row.

    Returns:
        The draft.
    """
    names = row.tensors
    # In a row of one element the derivatives of norms are exactly zero, where any rounding error is infinitely wrong.
    least = 2 if not reduced or stat in EXACT else 1
    outs = [f"grad_{n}" for n in names]
    lines = statements(row.tree)
    back, grads = adjoints(row.tree, lines, "dz") if row.tree.op else ((), {names[0]: "dz"})
    load = "upstream = tl.load(p_grad + base + at, mask=inside, other=0.0).to(tl.float32)"
    extra: list[str] = []
    for name, summand in sums:
        inner = live([*row.values(), load, f"added = tl.sum(tl.where(inside, {summand}, 0.0), 0)"], ("added",))
        extra += [
            f"{name} = 0.0",
            "for k0 in range(0, n, BLOCK):",
            *(f"    {line}" for line in inner),
            f"    {name} += added",
        ]
    upstream = ["upstream = tl.load(p_grad + row).to(tl.float32)"] if reduced else extra
    written = [*grads.values(), "at", "inside"]
    code = live([*row.values(), *([] if reduced else [load]), f"dz = {slope}", *back], written)
    stores = text.stores({o: grads[n] for n, o in zip(names, outs, strict=True)}, "base + at")
    d = AXES[row.axis][1]
    move = "" if row.axis == "last" else f".movedim(-1, {d})"
    dense = row.dense() if reduced else row.dense("grad_output")
    if reduced:
        dense += "\n    grad_output = grad_output.contiguous()"
    parameters = ", ".join([*names, "grad_output"])
    # The derivative of a sum or a mean needs no pass, that of a variance only the mean.
    passes = row.passes(stat, " ".join([slope, *(s for _, s in sums)]))
    reads = unread([passes, *extra, *code], names)
    expert = head("\n".join([passes, *extra, *code])) + ROWS.format(
        pointers=text.pointers(names),
        outs=", ".join(outs),
        passes=passes,
        upstream=text.indented(upstream),
        body=text.indented(code, 2),
        stores=text.indented(stores, 2),
        parameters=parameters,
        dense=dense,
        first=names[0],
        empty=text.empty_like(names),
        tensors=", ".join(names),
        returned=", ".join(f"{o}{move}" for o in outs),
    )
    body, helper = _reference(names, "\n".join([f"z = {row.tree.written('torch')}", *forward]))
    over = AXES[row.axis][2]
    subject = f"f = {row.about(said_as)} over {over}" + (f", where z = {formula(row.tree)}" if row.tree.op else "")
    summary = voice.one(
        f"The backward pass of {subject}. grad_output is the gradient of a loss with respect to f; return {_wanted(names)}.",
        f"Given grad_output, the gradient of a loss with respect to {subject}, return {_wanted(names)}.",
    )
    axes = AXES[row.axis][0]
    short = " ".join(a for a in axes.split() if a != "N")
    shape = {"last": "(*)", "first": "(C,)", "middle": "(B, C)"}[row.axis] if reduced else row.shape
    takes = row.takes() | {"grad_output": f'T("{short if reduced else axes}", "{row.dtype}")'}
    details = (
        voice.where(row.tree.meanings()),
        said(row, voice, f"grad_output has shape {shape} and the same dtype.", _gradients(names, voice), least),
        voice.closing(voice.rounding(row.dtype, len(names)), (*names, "grad_output")),
    )
    example = row.example(rng)
    upstream_row = Row(("grad_output",), leaf("grad_output"), row.axis, row.dtype).example(rng)
    if reduced:
        upstream_row = {"last": "[1, -0.5]", "first": "[1, -0.5, 2]", "middle": "[[1, -0.5, 2]]"}[row.axis]
    flops = 3 * row.tree.flops() + 2 * STATISTICS[stat].flops + 4
    return Draft(
        family=family,
        category=category,
        words=(*row.tree.words()[:2], word, "backward"),
        parameters=parameters,
        body=body,
        helpers=helper,
        summary=summary,
        details=details,
        examples=(f"{example}, {upstream_row}",),
        takes=dict.fromkeys((*names, "grad_output"), row.dtype),
        fields=row.fields(flops, takes, 32, _reads(reads), least),
        expert=expert,
        size=2 * row.tree.count() + 4,
        hard=1,
        imports=("from kbx_env.tasks._varied import sizes",),
    )


def reduce(rng: random.Random, level: int) -> Draft:
    """Draw the gradient of a reduction of an expression."""
    voice = Voice(rng)
    name = rng.choice(tuple(REDUCED))
    low = 1 if name in ("sum", "mean") else 0
    row = draw_row(
        rng,
        rng.randint(low, max(low, 2 * level - 3)),
        1 + (rng.random() < 0.4 and level > 1),
        smooth=True,
        largest=60.0,
    )
    if not row.tree.op and low:
        row = draw_row(rng, 2, 1, smooth=True, largest=60.0)
    stat = STATISTICS[name]
    return _row_draft(
        rng,
        voice,
        row,
        family="backward_reduce",
        category="reduce",
        word=stat.word,
        stat=name,
        sums=(),
        slope=REDUCED[name],
        forward=(f"return {stat.torch.replace('AXIS', str(AXES[row.axis][1]))}",),
        said_as=stat.text,
        reduced=True,
    )


def norm(rng: random.Random, level: int) -> Draft:
    """Draw the gradient of a softmax or norm of an expression."""
    voice = Voice(rng)
    kind = rng.choice(tuple(NORMED))
    stat, sums, slope = NORMED[kind]
    row = draw_row(
        rng,
        rng.randint(0, max(0, 2 * level - 3)),
        1 + (rng.random() < 0.4 and level > 1),
        smooth=True,
        largest=60.0 if "softmax" in kind else 400.0,
    )
    forward, _, said_as, word = NORMS[kind]
    return _row_draft(
        rng,
        voice,
        row,
        family="backward_norm",
        category="math" if "softmax" in kind else "normalization",
        word=word,
        stat=stat,
        sums=sums,
        slope=slope,
        forward=(f"return {forward.replace('AXIS', str(AXES[row.axis][1]))}",),
        said_as=f"{said_as}, with {OVER[kind]}",
        reduced=False,
    )


FAMILIES = {"backward_pointwise": pointwise, "backward_reduce": reduce, "backward_norm": norm}
