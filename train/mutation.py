"""Mutations of correct kernels: wrong versions with one fault each, of the kinds that beginners make.

A demonstration over several turns shows a wrong module, the grader's feedback on it, and the correct one. Faults are chosen by
their number in the syntax tree, so that one seed puts the same fault into a kernel and into the same kernel under other names.
"""

from __future__ import annotations

import ast
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

KINDS = ("operator", "number", "name", "line", "bracket")
"""Another operator or comparison; another constant; an undefined name; a missing line; a missing bracket."""
_SWAPS: dict[type[ast.AST], str] = {
    ast.Add: "-", ast.Sub: "+", ast.Mult: "+", ast.Div: "*", ast.FloorDiv: "*", ast.Mod: "//", ast.Lt: ">=", ast.LtE: ">",
    ast.Gt: "<=", ast.GtE: "<", ast.Eq: "!=", ast.NotEq: "==",
}  # fmt: skip
_SIGNS: dict[type[ast.AST], str] = {
    ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.FloorDiv: "//", ast.Mod: "%", ast.Lt: "<", ast.LtE: "<=",
    ast.Gt: ">", ast.GtE: ">=", ast.Eq: "==", ast.NotEq: "!=",
}  # fmt: skip
_ENDS = ("_", "_0", "_x")
"""Suffixes that make a name undefined: hardly any kernel has names with them."""


At = Callable[[int, int], int]
"""From a line, counted from 1, and a column in bytes, as in the syntax tree, to a position in characters."""


@dataclass(frozen=True)
class Fault:
    """A fault: the characters from ``begin`` to ``end`` are replaced by ``text``."""

    begin: int
    end: int
    text: str


def broken(source: str, count: int, seed: int | str) -> list[tuple[str, str]]:
    """Return different versions of a source with one fault each; the kinds of faults take turns.

    The grader must decide whether a version is wrong: the result may not depend on the changed place.

    Args:
        source: a correct Python module.
        count: number of versions; fewer where the source has fewer places for a fault.
        seed: seed of the choice.

    Returns:
        For each version the kind of its fault, one of ``KINDS``, and its source.

    Raises:
        SyntaxError: the source is no Python.
    """
    draw, nodes, at = random.Random(f"{seed} faults"), list(_walk(source)), _offsets(source)
    sites = {kind: find(source, nodes, at) for kind, find in _FINDERS.items()}
    for kind in KINDS:
        draw.shuffle(sites[kind])
    found: list[tuple[str, str]] = []
    while len(found) < count and any(sites.values()):
        for kind in KINDS:
            if sites[kind] and len(found) < count:
                fault = sites[kind].pop()
                found.append((kind, source[: fault.begin] + fault.text + source[fault.end :]))
    return found


def fault_sites(source: str, kinds: Sequence[str]) -> list[Fault]:
    """Return all single faults of some kinds, in the order of the text.

    Args:
        source: a Python module.
        kinds: some of ``KINDS``.

    Returns:
        The faults.

    Raises:
        SyntaxError: the source is no Python.
    """
    nodes, at = list(_walk(source)), _offsets(source)
    return sorted((f for kind in kinds for f in _FINDERS[kind](source, nodes, at)), key=lambda f: (f.begin, f.end))


def with_faults(source: str, faults: Sequence[Fault]) -> str:
    """Return a source with several faults, which must not overlap."""
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
    """Yield the functions and the nodes of their bodies, in the order of the tree: imports, signatures and decorators stay."""
    for function in ast.parse(source).body:
        if isinstance(function, ast.FunctionDef):
            yield function
            for line in function.body:
                yield from ast.walk(line)


_FINDERS: dict[str, Callable[[str, Sequence[ast.AST], At], list[Fault]]] = {
    "operator": _operators, "number": _numbers, "name": _names, "line": _lines, "bracket": _brackets,
}  # fmt: skip
