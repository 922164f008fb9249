"""Wrong answers to begin a repair with: right kernels, each with one fault of the kinds that beginners make.

A demonstration of several turns shows a wrong module, what the grader says of it, and the right one. Faults are put where the
syntax tree says, by number: the same kernel under other names is broken in the same place by the same seed.
"""

from __future__ import annotations

import ast
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

KINDS = ("operator", "number", "name", "line", "bracket")
"""Another operator or comparison; another constant; a name that nobody has defined; a line left out; a bracket left out."""
_SWAPS: dict[type[ast.AST], str] = {
    ast.Add: "-", ast.Sub: "+", ast.Mult: "+", ast.Div: "*", ast.FloorDiv: "*", ast.Mod: "//", ast.Lt: ">=", ast.LtE: ">",
    ast.Gt: "<=", ast.GtE: "<", ast.Eq: "!=", ast.NotEq: "==",
}  # fmt: skip
_SIGNS: dict[type[ast.AST], str] = {
    ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.FloorDiv: "//", ast.Mod: "%", ast.Lt: "<", ast.LtE: "<=",
    ast.Gt: ">", ast.GtE: ">=", ast.Eq: "==", ast.NotEq: "!=",
}  # fmt: skip
_ENDS = ("_", "_0", "_x")
"""Behind a name: hardly any kernel has names that end so."""


At = Callable[[int, int], int]
"""From a line, counted from 1, and a column in bytes, as the syntax tree has them, to a position."""


@dataclass(frozen=True)
class Fault:
    """Replace ``begin`` to ``end`` (character positions) by ``text``."""

    begin: int
    end: int
    text: str


def broken(source: str, count: int, seed: int | str) -> list[tuple[str, str]]:
    """Up to ``count`` different wrong versions of a source, each with the kind of its fault; kinds by turns.

    Whether they are wrong is for the grader to say: a fault may lie where nothing depends on it.

    Args:
        source: Python that is right.
        count: how many at most; fewer where there are fewer places.
        seed: of the places.

    Raises:
        SyntaxError: the source is no Python.
    """
    draw, nodes, at = random.Random(f"{seed} faults"), list(_walk(source)), _offsets(source)
    places = {kind: find(source, nodes, at) for kind, find in _FINDERS.items()}
    for kind in KINDS:
        draw.shuffle(places[kind])
    found: list[tuple[str, str]] = []
    while len(found) < count and any(places.values()):
        for kind in KINDS:
            if places[kind] and len(found) < count:
                fault = places[kind].pop()
                found.append((kind, source[: fault.begin] + fault.text + source[fault.end :]))
    return found


def places(source: str, kinds: Sequence[str]) -> list[Fault]:
    """All single faults of some kinds, in the order of the text.

    Raises:
        SyntaxError: the source is no Python.
    """
    nodes, at = list(_walk(source)), _offsets(source)
    return sorted((f for kind in kinds for f in _FINDERS[kind](source, nodes, at)), key=lambda f: (f.begin, f.end))


def with_faults(source: str, faults: Sequence[Fault]) -> str:
    """The source with several faults, none of which overlaps another."""
    for fault in sorted(faults, key=lambda f: f.begin, reverse=True):
        source = source[: fault.begin] + fault.text + source[fault.end :]
    return source


def _offsets(source: str) -> At:
    lines = [line + "\n" for line in source.split("\n")]
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))
    return lambda line, column: starts[line - 1] + len(lines[line - 1].encode()[:column].decode())


def _operators(source: str, nodes: Sequence[ast.AST], at: At) -> list[Fault]:
    found: list[Fault] = []
    for node in nodes:
        pair: tuple[ast.expr, ast.AST, ast.expr] | None = None
        if isinstance(node, ast.BinOp):
            pair = node.left, node.op, node.right
        elif isinstance(node, ast.Compare) and len(node.ops) == 1:
            pair = node.left, node.ops[0], node.comparators[0]
        if pair is None or type(pair[1]) not in _SWAPS:
            continue
        begin = at(pair[0].end_lineno or 0, pair[0].end_col_offset or 0)
        between = source[begin : at(pair[2].lineno, pair[2].col_offset)]
        sign = _SIGNS[type(pair[1])]
        if between.count(sign) == 1 and "#" not in between:
            place = begin + between.index(sign)
            found.append(Fault(place, place + len(sign), _SWAPS[type(pair[1])]))
    return found


def _numbers(source: str, nodes: Sequence[ast.AST], at: At) -> list[Fault]:
    found: list[Fault] = []
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, int | float) and not isinstance(node.value, bool):
            if not math.isfinite(2 * node.value):
                continue  # its text would be a name
            text = repr(node.value * 2 + 1) if node.value == 0 else repr(node.value * 2)
            found.append(Fault(at(node.lineno, node.col_offset), at(node.end_lineno or 0, node.end_col_offset or 0), text))
    return found


def _names(source: str, nodes: Sequence[ast.AST], at: At) -> list[Fault]:
    found: list[Fault] = []
    for node in nodes:
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id not in ("tl", "torch", "triton"):
            end = at(node.end_lineno or 0, node.end_col_offset or 0)
            found.append(Fault(end, end, _ENDS[len(found) % len(_ENDS)]))
    return found


def _lines(source: str, nodes: Sequence[ast.AST], at: At) -> list[Fault]:
    found: list[Fault] = []
    for node in nodes:
        for body in (getattr(node, "body", None), getattr(node, "orelse", None)):
            if not isinstance(body, list) or len(body) < 2:
                continue
            for line in body:
                if isinstance(line, ast.Assign | ast.AugAssign | ast.Expr | ast.Return):
                    end = at(line.end_lineno or 0, line.end_col_offset or 0)
                    found.append(Fault(at(line.lineno, line.col_offset), end, "pass"))
    return found


def _brackets(source: str, nodes: Sequence[ast.AST], at: At) -> list[Fault]:
    found: list[Fault] = []
    for node in nodes:
        if isinstance(node, ast.Call):
            end = at(node.end_lineno or 0, node.end_col_offset or 0)
            found.append(Fault(end - 1, end, ""))
    return found


def _walk(source: str) -> Iterator[ast.AST]:
    """Functions and the nodes of their bodies, in the order of the tree: imports, heads and decorators stay as they are."""
    for function in ast.parse(source).body:
        if isinstance(function, ast.FunctionDef):
            yield function
            for line in function.body:
                yield from ast.walk(line)


_FINDERS: dict[str, Callable[[str, Sequence[ast.AST], At], list[Fault]]] = {
    "operator": _operators, "number": _numbers, "name": _names, "line": _lines, "bracket": _brackets,
}  # fmt: skip
