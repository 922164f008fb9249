"""Elementwise expressions: one tree, written as torch, as Triton, as a formula, and differentiated for kernels.

Every operation is defined on the whole line and grows at most quadratically, so that any composition is finite for the
inputs that are drawn. Triton computes in fp32.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

Interval = tuple[float, float]
"""Least and largest value."""
DOMAIN: Interval = (-60.0, 60.0)
"""Range of the inputs that are drawn: normal values, some of them times ten."""
LARGEST = 2.0e4
"""Largest intermediate value of a drawn expression, far below the largest fp16 number (65504)."""


@dataclass(frozen=True)
class Op:
    """An elementwise operation. Templates name the operands ``a`` and ``b``, and the result ``y``.

    Attributes:
        torch: the call in torch.
        triton: the same in Triton, fp32.
        text: the same as a formula.
        slopes: derivatives by operand, in Triton.
        bounds: interval of the result from those of the operands.
        meaning: defines the name that ``text`` uses; empty where it is common knowledge.
        word: part of a function's name.
        flops: operations for one element.
        smooth: whether the derivative is continuous.
    """

    torch: str
    triton: str
    text: str
    slopes: tuple[str, ...]
    bounds: Callable[..., Interval]
    meaning: str = ""
    word: str = ""
    flops: int = 1
    smooth: bool = True


def _rising(f: Callable[[float], float]) -> Callable[[Interval], Interval]:
    """Bounds of a function that never falls."""
    return lambda a: (f(a[0]), f(a[1]))


def _dipping(least: float) -> Callable[[Interval], Interval]:
    """Bounds of a function that lies between ``least`` and 0 on the left of 0, and between 0 and its operand on the right."""
    return lambda a: (0.0 if a[0] >= 0 else least, max(a[1], 0.0))


def _sigmoid(v: float) -> float:
    return 1 / (1 + math.exp(-v)) if v > -700 else 0.0


def _even(f: Callable[[float], float], least: float) -> Callable[[Interval], Interval]:
    """Bounds of an even function that grows with the size of its operand."""
    return lambda a: (least, max(f(a[0]), f(a[1])))


def _corners(f: Callable[[float, float], float]) -> Callable[[Interval, Interval], Interval]:
    def bounds(a: Interval, b: Interval) -> Interval:
        found = [f(x, y) for x in a for y in b]
        return min(found), max(found)

    return bounds


def _between(low: float, high: float) -> Callable[..., Interval]:
    return lambda *a: (low, high)


SIGMOID = "sigmoid(z) = 1 / (1 + exp(-z))"
OPS: Mapping[str, Op] = {
    "relu": Op(
        "torch.relu({a})",
        "tl.maximum({a}, 0.0)",
        "max({a}, 0)",
        ("tl.where({a} > 0.0, 1.0, 0.0)",),
        lambda a: (max(a[0], 0), max(a[1], 0)),
        word="relu",
        smooth=False,
    ),
    "abs": Op(
        "torch.abs({a})",
        "tl.abs({a})",
        "|{a}|",
        ("tl.where({a} >= 0.0, 1.0, -1.0)",),
        _even(abs, 0.0),
        word="abs",
        smooth=False,
    ),
    "sigmoid": Op(
        "torch.sigmoid({a})",
        "tl.sigmoid({a})",
        "sigmoid({a})",
        ("{y} * (1.0 - {y})",),
        _rising(_sigmoid),
        SIGMOID,
        "sigmoid",
        4,
    ),
    "tanh": Op(
        "torch.tanh({a})",
        "libdevice.tanh({a})",
        "tanh({a})",
        ("1.0 - {y} * {y}",),
        _rising(math.tanh),
        word="tanh",
        flops=4,
    ),
    "silu": Op(
        "F.silu({a})",
        "{a} * tl.sigmoid({a})",
        "silu({a})",
        ("tl.sigmoid({a}) * (1.0 + {a} * (1.0 - tl.sigmoid({a})))",),
        _dipping(-0.3),
        "silu(z) = z / (1 + exp(-z))",
        "silu",
        5,
    ),
    "softplus": Op(
        "F.softplus({a})",
        "_softplus({a})",
        "softplus({a})",
        ("tl.sigmoid({a})",),
        lambda a: (0, max(a[1], 0) + 0.7),
        "softplus(z) = log(1 + exp(z))",
        "softplus",
        5,
    ),
    "gelu": Op(
        "F.gelu({a})",
        "0.5 * {a} * (1.0 + tl.erf({a} * 0.7071067811865476))",
        "gelu({a})",
        ("0.5 * (1.0 + tl.erf({a} * 0.7071067811865476)) + 0.3989422804014327 * {a} * tl.exp(-0.5 * {a} * {a})",),
        _dipping(-0.2),
        "gelu(z) = z / 2 * (1 + erf(z / sqrt(2)))",
        "gelu",
        6,
    ),
    "softsign": Op(
        "F.softsign({a})",
        "{a} / (1.0 + tl.abs({a}))",
        "softsign({a})",
        ("1.0 / ((1.0 + tl.abs({a})) * (1.0 + tl.abs({a})))",),
        _rising(lambda v: v / (1 + abs(v))),
        "softsign(z) = z / (1 + |z|)",
        "softsign",
        3,
    ),
    "mish": Op(
        "F.mish({a})",
        "{a} * libdevice.tanh(_softplus({a}))",
        "mish({a})",
        ("_mish_slope({a})",),
        _dipping(-0.4),
        "mish(z) = z * tanh(log(1 + exp(z)))",
        "mish",
        9,
    ),
    "elu": Op(
        "F.elu({a})",
        "tl.where({a} > 0.0, {a}, libdevice.expm1(tl.minimum({a}, 0.0)))",
        "elu({a})",
        ("tl.where({a} > 0.0, 1.0, tl.exp(tl.minimum({a}, 0.0)))",),
        _dipping(-1.0),
        "elu(z) = max(z, 0) + min(exp(z) - 1, 0)",
        "elu",
        4,
    ),
    "hardswish": Op(
        "F.hardswish({a})",
        "{a} * tl.minimum(tl.maximum({a} + 3.0, 0.0), 6.0) / 6.0",
        "hardswish({a})",
        ("0.0",),
        _dipping(-0.4),
        "hardswish(z) = z * min(max(z + 3, 0), 6) / 6",
        "hardswish",
        5,
        False,
    ),
    "clamp": Op(
        "torch.clamp({a}, -3, 3)",
        "tl.minimum(tl.maximum({a}, -3.0), 3.0)",
        "min(max({a}, -3), 3)",
        ("0.0",),
        _rising(lambda v: min(max(v, -3.0), 3.0)),
        word="clamp",
        flops=2,
        smooth=False,
    ),
    "square": Op(
        "torch.square({a})", "{a} * {a}", "({a})^2", ("2.0 * {a}",), _even(lambda v: v * v, 0.0), word="square"
    ),
    "sin": Op("torch.sin({a})", "tl.sin({a})", "sin({a})", ("tl.cos({a})",), _between(-1, 1), word="sin", flops=4),
    "cos": Op("torch.cos({a})", "tl.cos({a})", "cos({a})", ("-tl.sin({a})",), _between(-1, 1), word="cos", flops=4),
    "erf": Op(
        "torch.erf({a})",
        "tl.erf({a})",
        "erf({a})",
        ("1.1283791670955126 * tl.exp(-({a} * {a}))",),
        _rising(math.erf),
        word="erf",
        flops=4,
    ),
    "gauss": Op(
        "torch.exp(-torch.square({a}))",
        "tl.exp(-({a} * {a}))",
        "exp(-({a})^2)",
        ("-2.0 * {a} * {y}",),
        _between(0, 1),
        word="gauss",
        flops=3,
    ),
    "decay": Op(
        "torch.exp(-torch.abs({a}))",
        "tl.exp(-tl.abs({a}))",
        "exp(-|{a}|)",
        ("tl.where({a} >= 0.0, -{y}, {y})",),
        _between(0, 1),
        word="decay",
        flops=3,
        smooth=False,
    ),
    "lorentz": Op(
        "1 / (1 + torch.square({a}))",
        "1.0 / (1.0 + {a} * {a})",
        "1 / (1 + ({a})^2)",
        ("-2.0 * {a} * {y} * {y}",),
        _between(0, 1),
        word="lorentz",
        flops=3,
    ),
    "log1psq": Op(
        "torch.log1p(torch.square({a}))",
        "libdevice.log1p({a} * {a})",
        "log(1 + ({a})^2)",
        ("2.0 * {a} / (1.0 + {a} * {a})",),
        _even(lambda v: math.log1p(v * v), 0.0),
        word="logsq",
        flops=3,
    ),
    "charbonnier": Op(
        "torch.sqrt(torch.square({a}) + 1)",
        "tl.sqrt_rn({a} * {a} + 1.0)",
        "sqrt(({a})^2 + 1)",
        ("{a} / {y}",),
        _even(lambda v: math.sqrt(v * v + 1), 1.0),
        word="charbonnier",
        flops=3,
    ),
    "rsqrt": Op(
        "torch.rsqrt(torch.square({a}) + 1)",
        "1.0 / tl.sqrt_rn({a} * {a} + 1.0)",
        "1 / sqrt(({a})^2 + 1)",
        ("-{a} * {y} * {y} * {y}",),
        _between(0, 1),
        word="rsqrt",
        flops=4,
    ),
    "neg": Op("-({a})", "-{a}", "-({a})", ("-1.0",), lambda a: (-a[1], -a[0]), word="neg"),
    "add": Op("({a} + {b})", "{a} + {b}", "({a} + {b})", ("1.0", "1.0"), _corners(lambda x, y: x + y), word="add"),
    "sub": Op("({a} - {b})", "{a} - {b}", "({a} - {b})", ("1.0", "-1.0"), _corners(lambda x, y: x - y), word="sub"),
    "mul": Op("({a} * {b})", "{a} * {b}", "({a} * {b})", ("{b}", "{a}"), _corners(lambda x, y: x * y), word="mul"),
    "maximum": Op(
        "torch.maximum({a}, {b})",
        "tl.maximum({a}, {b})",
        "max({a}, {b})",
        ("0.0", "0.0"),
        _corners(max),
        word="max",
        smooth=False,
    ),
    "minimum": Op(
        "torch.minimum({a}, {b})",
        "tl.minimum({a}, {b})",
        "min({a}, {b})",
        ("0.0", "0.0"),
        _corners(min),
        word="min",
        smooth=False,
    ),
    "damped": Op(
        "({a} / (1 + torch.square({b})))",
        "{a} / (1.0 + {b} * {b})",
        "({a} / (1 + ({b})^2))",
        ("1.0 / (1.0 + {b} * {b})", "-2.0 * {a} * {b} / ((1.0 + {b} * {b}) * (1.0 + {b} * {b}))"),
        lambda a, b: (min(a[0], 0), max(a[1], 0)),
        word="div",
        flops=3,
    ),
    "hypot": Op(
        "torch.sqrt(torch.square({a}) + torch.square({b}) + 1)",
        "tl.sqrt_rn({a} * {a} + {b} * {b} + 1.0)",
        "sqrt(({a})^2 + ({b})^2 + 1)",
        ("{a} / {y}", "{b} / {y}"),
        lambda a, b: (1, math.hypot(max(map(abs, a)), max(map(abs, b))) + 1),
        word="hypot",
        flops=5,
    ),
    "glu": Op(
        "({a} * torch.sigmoid({b}))",
        "{a} * tl.sigmoid({b})",
        "({a} * sigmoid({b}))",
        ("tl.sigmoid({b})", "{a} * tl.sigmoid({b}) * (1.0 - tl.sigmoid({b}))"),
        lambda a, b: (min(a[0], 0), max(a[1], 0)),
        SIGMOID,
        "glu",
        5,
    ),
    "swiglu": Op(
        "({a} * F.silu({b}))",
        "{a} * {b} * tl.sigmoid({b})",
        "({a} * silu({b}))",
        ("{b} * tl.sigmoid({b})", "{a} * tl.sigmoid({b}) * (1.0 + {b} * (1.0 - tl.sigmoid({b})))"),
        _corners(lambda x, y: x * y),
        "silu(z) = z / (1 + exp(-z))",
        "swiglu",
        6,
    ),
}
"""All operations by name."""
EVEN = dict.fromkeys(
    ("abs", "square", "cos", "gauss", "decay", "lorentz", "log1psq", "charbonnier", "rsqrt", "hypot"), 0
)
EVEN["damped"] = 1
"""Operations for which the sign of an operand makes no difference, and from which operand on."""
ROOTS = ("charbonnier", "rsqrt", "hypot")
"""Operations that take a root at the end; others square it again."""
SQUARING = (*ROOTS, "square", "gauss", "lorentz", "log1psq", "damped")
"""Operations that square their operands, ``damped`` the second one only."""
UNARY = tuple(k for k, op in OPS.items() if len(op.slopes) == 1)
BINARY = tuple(k for k, op in OPS.items() if len(op.slopes) == 2)
IMPORTS = """\
import torch
import triton
import triton.language as tl
"""
"""First lines of every kernel's file."""
HELPERS = {
    "_softplus": """@triton.jit
def _softplus(z):
    return tl.maximum(z, 0.0) + libdevice.log1p(tl.exp(-tl.abs(z)))
""",
    "_mish_slope": """@triton.jit
def _mish_slope(z):
    t = libdevice.tanh(_softplus(z))
    return t + z * tl.sigmoid(z) * (1.0 - t * t)
""",
}
"""Functions that templates in Triton call; each calls only earlier ones."""


@dataclass(frozen=True)
class Node:
    """A leaf (a tensor, a scalar parameter, a number) or an operation on nodes.

    Attributes:
        op: name in ``OPS``; empty for a leaf.
        parts: the operands.
        name: of a tensor or parameter; the text of a number.
        span: interval of a leaf's values.
    """

    op: str = ""
    parts: tuple[Node, ...] = ()
    name: str = ""
    span: Interval = field(default=DOMAIN, compare=False)

    def bounds(self) -> Interval:
        """Return an interval that contains all values."""
        return OPS[self.op].bounds(*(p.bounds() for p in self.parts)) if self.op else self.span

    def walk(self) -> Iterator[Node]:
        """Yield all nodes, operands first."""
        for part in self.parts:
            yield from part.walk()
        yield self

    def written(self, kind: str, names: Mapping[str, str] | None = None) -> str:
        """Return the expression as text.

        Args:
            kind: ``torch``, ``triton`` or ``text``.
            names: replaces the names of leaves.

        Returns:
            One line.
        """
        if not self.op:
            return (names or {}).get(self.name, self.name)
        return _filled(getattr(OPS[self.op], kind), dict(zip("ab", (p.written(kind, names) for p in self.parts))))

    def leaves(self) -> tuple[str, ...]:
        """Return the names of its leaves, each once."""
        return tuple(dict.fromkeys(n.name for n in self.walk() if not n.op))

    def count(self) -> int:
        """Return the number of operations."""
        return sum(bool(n.op) for n in self.walk())

    def flops(self) -> int:
        """Return the arithmetic operations for one element, at least 1."""
        return max(1, sum(OPS[n.op].flops for n in self.walk() if n.op))

    def words(self) -> list[str]:
        """Return the words of its operations, the first ones first, each once."""
        return list(dict.fromkeys(OPS[n.op].word for n in self.walk() if n.op))

    def meanings(self) -> list[str]:
        """Return the definitions of the names in its formula."""
        return list(dict.fromkeys(OPS[n.op].meaning for n in self.walk() if n.op and OPS[n.op].meaning))


def meanings(*nodes: Node | None) -> list[str]:
    """Return the definitions of the names in the formulas of expressions, each once."""
    return list(dict.fromkeys(m for node in nodes if node for m in node.meanings()))


def formula(node: Node) -> str:
    """Return the expression as a formula, without parentheses around all of it."""
    return _bare(node.written("text"))


def _plain(text: str) -> bool:
    """Return whether a text is a name or one call, which needs no parentheses before a power or behind a sign."""
    call = re.match(r"\w+(?=\()", text)
    return text.isidentifier() or (call is not None and _bare(text[call.end() :]) != text[call.end() :])


def _bare(text: str) -> str:
    """Return a text without the parentheses around all of it."""
    depth = 0
    for k, c in enumerate(text):
        depth += (c == "(") - (c == ")")
        if depth == 0:
            return text[1:-1] if text.startswith("(") and k == len(text) - 1 else text
    return text


def _filled(template: str, operands: Mapping[str, str]) -> str:
    """Return a template with operands, without parentheses that say nothing."""
    inner = {}
    for name, text in operands.items():
        if _plain(text):
            for before, behind in (("", "^2"), ("-", "")):
                template = template.replace(f"{before}({{{name}}}){behind}", f"{before}{{{name}}}{behind}")
        enclosed = re.findall(rf"(?<=[(,|])\s?\{{{name}\}}(?=[),|])", template)
        inner[name] = _bare(text) if len(enclosed) == template.count(f"{{{name}}}") else text
    return template.format(**inner)


def leaf(name: str, span: Interval = DOMAIN) -> Node:
    """Return a leaf; ``span`` is the interval of its values."""
    return Node(name=name, span=span)


def draw(
    rng: random.Random, leaves: Sequence[Node], operations: int, *, smooth: bool = False, largest: float = LARGEST
) -> Node:
    """Draw an expression that uses every leaf.

    Args:
        rng: makes the choices.
        leaves: the operands.
        operations: about the number of operations; at least one less than the leaves.
        smooth: use operations with continuous derivatives only.
        largest: bound on every intermediate value.

    Returns:
        The expression.
    """
    binary = [k for k in BINARY if OPS[k].smooth or not smooth]
    unary = [k for k in UNARY if OPS[k].smooth or not smooth]
    while True:
        nodes = list(leaves)
        rng.shuffle(nodes)
        left = operations
        while len(nodes) > 1 or left > 0:
            # Unary operations are spread over the leaves and the joined parts.
            if len(nodes) > 1 and (left <= len(nodes) - 1 or rng.random() < 0.4):
                a, b = nodes.pop(), nodes.pop()
                nodes.insert(0, Node(rng.choice(binary), (a, b)))
            else:
                at = rng.randrange(len(nodes))
                choices = [k for k in unary if k != nodes[at].op and not {k, nodes[at].op} <= {"abs", "square", "relu"}]
                nodes[at] = Node(rng.choice(choices), (nodes[at],))
            left -= 1
        found = nodes[0]
        if not found.op or OPS[found.op].word in ("neg",):
            continue
        if all(max(map(abs, n.bounds())) <= largest for n in found.walk()) and _sensible(found):
            return found


def _sensible(node: Node) -> bool:
    """Return whether every operation does something: no periodic function of huge values, no flat tail, no lost sign."""
    return all(_bounded_well(n) and _changes_something(n) for n in node.walk() if n.op)


def _bounded_well(n: Node) -> bool:
    """Return whether an operation does not see values that are too large for it."""
    reach = max(max(map(abs, p.bounds())) for p in n.parts)
    if n.op in ("sin", "cos"):
        return reach <= 100
    return reach <= 200 or n.op not in ("gauss", "erf", "tanh", "sigmoid", "lorentz", "decay")


def _changes_something(n: Node) -> bool:
    """Return whether an operation is neither the identity nor constant, and no sign or root is lost."""
    if n.op in EVEN and any(p.op in ("abs", "neg") for p in n.parts[EVEN[n.op] :]):
        return False
    if n.op in SQUARING and any(p.op in ROOTS for p in n.parts[EVEN[n.op] :]):
        return False
    if n.op in ("add", "sub", "mul") and any(p.op == "neg" for p in n.parts):
        return False
    low, high = n.parts[0].bounds()
    if n.op in ("abs", "decay", "relu", "clamp") and (low >= 0 or high <= 0):
        return False
    if n.op == "clamp" and low >= -3 and high <= 3 or n.op == "elu" and low >= 0:
        return False
    if len(n.parts) < 2:
        return True
    if n.parts[0] == n.parts[1]:
        return False
    other = n.parts[1].bounds()
    return n.op not in ("maximum", "minimum") or (high > other[0] and other[1] > low)


@dataclass(frozen=True)
class Lines:
    """Statements in Triton.

    Attributes:
        body: the statements.
        result: name of the result.
        values: name of the value of every node.
    """

    body: tuple[str, ...]
    result: str
    values: Mapping[Node, str]


def statements(node: Node, names: Mapping[str, str] | None = None, prefix: str = "v") -> Lines:
    """Return an expression as statements, one for each operation.

    Args:
        node: the expression.
        names: replaces the names of leaves.
        prefix: of the names of values.

    Returns:
        The statements.
    """
    values: dict[Node, str] = {}
    body: list[str] = []
    for n in node.walk():
        if n in values:
            continue
        if not n.op:
            values[n] = (names or {}).get(n.name, n.name)
            continue
        values[n] = f"{prefix}{len(body)}"
        operands = {k: values[p] for k, p in zip("ab", n.parts)}
        body.append(f"{values[n]} = {OPS[n.op].triton.format(**operands)}")
    return Lines(tuple(body), values[node], values)


def adjoints(node: Node, lines: Lines, seed: str, prefix: str = "d") -> tuple[tuple[str, ...], Mapping[str, str]]:
    """Return statements for the derivatives by all leaves, in reverse mode.

    Args:
        node: the expression.
        lines: its statements.
        seed: name of the derivative by the result.
        prefix: of the names of derivatives.

    Returns:
        The statements, and the name of the derivative by each leaf.
    """
    order = list(dict.fromkeys(node.walk()))
    terms: dict[Node, list[str]] = {node: [seed]}
    body: list[str] = []
    found: dict[str, str] = {}
    for n in reversed(order):
        total = " + ".join(terms.get(n, ["0.0"]))
        name = f"{prefix}{len(body)}"
        body.append(f"{name} = {total}")
        if not n.op:
            found[n.name] = name
            continue
        operands = {k: lines.values[p] for k, p in zip("ab", n.parts)} | {"y": lines.values[n]}
        for part, slope in zip(n.parts, OPS[n.op].slopes, strict=True):
            terms.setdefault(part, []).append(f"{name} * ({slope.format(**operands)})")
    return tuple(body), found


def live(lines: Sequence[str], wanted: Iterable[str]) -> list[str]:
    """Return the statements that some names depend on.

    Args:
        lines: statements ``name = expression``, in order; every name is assigned once.
        wanted: the names.

    Returns:
        The statements that are needed, in order.
    """
    needed, kept = set(wanted), []
    for line in reversed(lines):
        name, _, value = line.partition(" = ")
        if name in needed:
            needed |= set(re.findall(r"[A-Za-z_]\w*", value))
            kept.append(line)
    return kept[::-1]


def unread(lines: Sequence[str], tensors: Iterable[str]) -> dict[str, str]:
    """Return ``Cost.reads`` for tensors that statements do not load: a gradient may not depend on the values of an input.

    Args:
        lines: all statements of a kernel.
        tensors: names of tensors.

    Returns:
        ``"0"`` by tensor.
    """
    text = "\n".join(lines)
    return {t: "0" for t in tensors if f"tl.load(p_{t} " not in text}


def head(code: str, joins: str = "") -> str:
    """Return what stands before a kernel: imports, and the functions that its statements call.

    Args:
        code: the statements.
        joins: definitions of further functions.

    Returns:
        Source text, with two empty lines at its end.
    """
    called: list[str] = []
    for name in reversed(HELPERS):  # a helper calls those before it
        if name + "(" in code + "".join(called):
            called.insert(0, HELPERS[name] + "\n\n")
    text = joins + "".join(called)
    imports = IMPORTS + ("from triton.language.extra import libdevice\n" if "libdevice." in code + text else "")
    return imports + "\n\n" + text
