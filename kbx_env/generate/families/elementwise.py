"""Elementwise expressions of tensors of one shape (``pointwise``), and of rows with vectors (``broadcast``)."""

from __future__ import annotations

import random

from kbx_env.generate import text
from kbx_env.generate.drafts import Draft, Voice, listed
from kbx_env.generate.expressions import Node, draw, formula, head, leaf, statements

NAMES = (("x", "y", "z"), ("input", "other", "extra"), ("hidden", "gate", "residual"), ("a", "b", "c"), ("u", "v", "w"))
"""Names of tensors, of which a task has one row."""
SCALARS = ("alpha", "beta", "scale", "slope")
"""Names of scalar parameters."""
KERNEL = """@triton.jit
def _kernel({pointers}, out, n{scalars}, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
{loads}
{body}
    tl.store(out + at, {result}.to(out.dtype.element_ty), mask=inside)


def ENTRY({parameters}):
{dense}
    out = torch.empty({first}.shape, dtype={first}.dtype, device={first}.device)
    n = out.numel()
    if n:
        _kernel[(triton.cdiv(n, 1024),)]({tensors}, out, n{floats}, BLOCK=1024, num_warps=4)
    return out
"""


def choose_dtype(rng: random.Random) -> str:
    """Return a floating-point dtype; half of the tasks are in fp32."""
    return rng.choice(("f32", "f32", "f16", "bf16"))


def scalar(rng: random.Random, voice: Voice) -> tuple[Node, float, str, str]:
    """Draw a scalar parameter.

    Args:
        rng: makes the choices.
        voice: chooses the words.

    Returns:
        The leaf, its default, how cases draw it, and what the contract says.
    """
    name = rng.choice(SCALARS)
    default = rng.choice((0.5, 1.0, 1.5, 2.0))
    text = voice.one(f"{name} is a Python float.", f"{name} is a float.", f"{name}: a Python float of either sign.")
    return leaf(name, (-3.0, 3.0)), default, f"{name!r}: pick.real(-3, 3)".replace("'", '"'), text


def pointwise(rng: random.Random, level: int) -> Draft:
    """Draw an expression of one to three tensors of one shape, with at most one scalar parameter."""
    voice = Voice(rng)
    count = rng.randint(1, min(3, level + 1))
    tensors = rng.choice(NAMES)[:count]
    leaves = [leaf(n) for n in tensors]
    given = scalar(rng, voice) if rng.random() < 0.4 else None
    if given:
        # torch's functions take tensors: a number is joined with one first.
        at = rng.randrange(count)
        leaves[at] = Node(rng.choice(("mul", "mul", "add", "sub")), (leaves[at], given[0]))
    if level > 2:  # a tensor that is used twice
        leaves.append(leaves[0])
    tree = draw(rng, leaves, max(len(leaves), 3 * level - 2 + rng.randint(0, 1)) - (given is not None))
    dtype = choose_dtype(rng)
    parameters = ", ".join([*tensors, *([f"{given[0].name}={given[1]}"] if given else [])])
    lines = statements(tree)
    scalars = [given[0].name] if given else []
    expert = head("\n".join(lines.body)) + KERNEL.format(
        pointers=text.pointers(tensors),
        scalars="".join(f", {s}" for s in scalars),
        loads=text.indented(text.loads(tensors, "at")),
        body=text.indented(lines.body),
        result=lines.result,
        parameters=parameters,
        dense=text.indented(text.contiguous(tensors)),
        first=tensors[0],
        tensors=", ".join(tensors),
        floats="".join(f", float({s})" for s in scalars),
    )
    shape = "tensor" if count == 1 else "tensors of one shape"
    word = voice.dtype(dtype)
    summary = voice.one(
        f"{formula(tree)}, elementwise.",
        f"Elementwise, the result is {formula(tree)}.",
        f"Return {formula(tree)}, computed for every element.",
        f"y = {formula(tree)} for every element of the input."
        if count == 1 and tensors[0] != "y"
        else f"Computes {formula(tree)} elementwise.",
    )
    details = (
        voice.where(tree.meanings()),
        " ".join(
            [
                voice.one(
                    f"{listed(tensors)} {'is a' if count == 1 else 'are'} {word} {shape}, of any rank.",
                    f"Any rank; {listed(tensors)} {'has' if count == 1 else 'have'} dtype {word}"
                    + ("." if count == 1 else " and the same shape."),
                ),
                given[3] if given else "",
                voice.one(
                    "The result is a new tensor of the same shape and dtype.",
                    "Return a new tensor of the same shape and dtype.",
                ),
            ]
        ).replace("  ", " "),
        voice.closing(voice.rounding(dtype), tensors, voice.empty()),
    )
    cases = text.flat_cases(tensors[0], tensors[-1], given[0].name if given else "")
    family = f"elementwise(lambda pick: {{{given[2]}}})" if given else "elementwise()"
    numbers = [text.vector(rng) for _ in tensors]
    fields = {
        "takes": text.mapping({t: f'T("*", "{dtype}")' for t in tensors}),
        "truth": "Close(ulps=16)",
        "cost": f'Cost(flops="{tree.flops()} * numel({tensors[0]})", least="numel({tensors[0]})")',
        "cases": text.block(cases),
        "varied": f"({family},)",
        "timed": text.flat_timed(dtype),
    }
    prefix = () if count > 1 or tree.count() > 2 else ("scaled",) if given else ()
    return Draft(
        family="pointwise",
        category="activation" if count == 1 else "fusion" if tree.count() > 2 else "math",
        words=(*(prefix or (("fused",) if tree.count() > 2 else ())), *tree.words()[:4]),
        parameters=parameters,
        body=(f"return {tree.written('torch')}",),
        summary=summary,
        details=details,
        examples=(", ".join(numbers),),
        takes=dict.fromkeys(tensors, dtype),
        fields=fields,
        expert=expert,
        size=tree.count(),
        imports=("from kbx_env.tasks._varied import elementwise",),
    )


ROWS = """@triton.jit
def _kernel({pointers}, out, columns, n, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    row, column = at // columns, at % columns
{loads}
{body}
    tl.store(out + at, {result}.to(out.dtype.element_ty), mask=inside)


def ENTRY({parameters}):
{dense}
    out = torch.empty({first}.shape, dtype={first}.dtype, device={first}.device)
    n = out.numel()
    if n:
        _kernel[(triton.cdiv(n, 1024),)]({tensors}, out, {first}.shape[-1], n, BLOCK=1024, num_warps=4)
    return out
"""
KINDS = {"full": ("* C", "at"), "vector": ("C", "column"), "column": ("* 1", "row")}
"""Kind of tensor: its axes, and where its element lies."""
VECTORS = ("bias", "weight", "shift", "scale")
COLUMNS = ("row_scale", "row_bias", "gain")


def broadcast(rng: random.Random, level: int) -> Draft:
    """Draw an expression of a tensor of rows with vectors over the columns, or with one number for each row."""
    voice = Voice(rng)
    first = rng.choice(("x", "input", "hidden"))
    kinds = {first: "full"}
    for _ in range(rng.randint(1, 1 + (level > 1))):
        kind = rng.choice(("vector", "vector", "column"))
        kinds[rng.choice([n for n in (VECTORS if kind == "vector" else COLUMNS) if n not in kinds])] = kind
    if level > 2:
        kinds["residual"] = "full"
    tensors = tuple(kinds)
    tree = draw(rng, [leaf(n) for n in tensors], max(len(tensors), 3 * level - 2 + rng.randint(0, 1)))
    dtype = choose_dtype(rng)
    lines = statements(tree)
    places = {t: KINDS[k][1] for t, k in kinds.items()}
    expert = head("\n".join(lines.body)) + ROWS.format(
        pointers=text.pointers(tensors),
        loads=text.indented([line for t in tensors for line in text.loads([t], places[t])]),
        body=text.indented(lines.body),
        result=lines.result,
        parameters=", ".join(tensors),
        dense=text.indented(text.contiguous(tensors)),
        first=first,
        tensors=", ".join(tensors),
    )
    shapes = {"full": "(*, C)", "vector": "(C,)", "column": "(*, 1)"}
    said = [f"{t} {shapes[k]}" for t, k in kinds.items()]
    word = voice.dtype(dtype)
    details = (
        voice.where(tree.meanings()),
        " ".join(
            (
                voice.one(
                    f"Shapes: {listed(said)}; * stands for any number of axes, also none.",
                    f"The shapes are {listed(said)}, where * is any number of axes, also none, and smaller tensors broadcast.",
                ),
                voice.one(f"All tensors are {word}.", f"Every tensor has dtype {word}."),
                voice.one(
                    f"The result is a new tensor with {first}'s shape and dtype.",
                    f"Return a new tensor with the shape and dtype of {first}.",
                ),
            )
        ),
        voice.closing(voice.rounding(dtype), tensors, "There may be no rows (empty tensors)."),
    )
    summary = voice.one(
        f"{formula(tree)}, with broadcasting.",
        f"Elementwise with broadcasting: {formula(tree)}.",
        f"Return {formula(tree)}, where the tensors broadcast against each other.",
    )
    second = tensors[1]
    cases = (
        'Case({"*": (33,), "C": 65})',
        'Case({"*": (16, 9), "C": 130}, draw=Outlier())',
        'Case({"*": (1,), "C": 1025})',
        'Case({"*": (), "C": 7})',
        f'Case({{"*": (31,), "C": 40}}, layouts={{"{first}": "transposed"}})',
        f'Case({{"*": (5, 6), "C": 33}}, layouts={{"{first}": "strided", "{second}": "strided"}})',
        'Case({"*": (0,), "C": 5})',
        'Case({"*": (3, 5), "C": 211}, held=True)',
    )
    fields = {
        "takes": text.mapping({t: f'T("{KINDS[k][0]}", "{dtype}")' for t, k in kinds.items()}),
        "truth": "Close(ulps=16)",
        "cost": f'Cost(flops="{tree.flops()} * numel({first})", least="numel({first})")',
        "cases": text.block(cases),
        "varied": text.block(
            (
                'sizes(lambda p: {"*": p.shape(2, 3, 60), "C": p.whole(2, 40)})',
                'sizes(lambda p: {"*": (p.whole(1, 3),), "C": p.whole(1100, 1300)})',
            )
        ),
        "timed": 'tuple(Case({"*": (b,), "C": n}) for b, n in ((8192, 1024), (8192, 4096), (16384, 8192)))',
    }
    example = text.matrix(rng)
    shown = {
        "full": lambda: text.matrix(rng),
        "vector": lambda: text.vector(rng),
        "column": lambda: "[[0.5], [-1]]",
    }
    return Draft(
        family="broadcast",
        category="fusion",
        words=("rowwise" if "column" in kinds.values() else "bias" if "bias" in kinds else "fused", *tree.words()[:4]),
        parameters=", ".join(tensors),
        body=(f"return {tree.written('torch')}",),
        summary=summary,
        details=details,
        examples=(", ".join([example, *(shown[k]() for k in list(kinds.values())[1:])]),),
        takes=dict.fromkeys(tensors, dtype),
        fields=fields,
        expert=expert,
        size=tree.count() + 1,
        imports=("from kbx_env.tasks._varied import sizes",),
    )


FAMILIES = {"pointwise": pointwise, "broadcast": broadcast}
