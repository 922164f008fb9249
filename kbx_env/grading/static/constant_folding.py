"""Evaluates constant string expressions, so that a forbidden name in several pieces is still visible to the screen.

The source is not executed: a few pure operations on short strings are done here, on at most ``MAX_VALUES`` values for
each name.
"""

from __future__ import annotations

import ast
import itertools
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator

MAX_VALUES, MAX_LENGTH = 32, 256
"""Values of an expression that are followed; characters of a string, items of a join, terms of a sum."""
_METHODS = frozenset("lower upper strip lstrip rstrip replace removeprefix removesuffix swapcase title".split())
Value = str | int


def assignments(nodes: Iterable[ast.AST]) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Yield pairs of a target and the value that is assigned to it, wherever the nodes of a source show both."""
    for node in nodes:
        if isinstance(node, ast.Assign):
            for target in node.targets:
                yield from _pairs(target, node.value)
        elif isinstance(node, ast.AnnAssign | ast.NamedExpr) and node.value is not None:
            yield from _pairs(node.target, node.value)
        elif isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
            before = ast.copy_location(ast.Name(node.target.id, ast.Load()), node)
            yield node.target, ast.copy_location(ast.BinOp(before, node.op, node.value), node)
        elif isinstance(node, ast.For | ast.comprehension) and isinstance(node.iter, ast.Tuple | ast.List | ast.Set):
            for item in node.iter.elts:
                yield from _pairs(node.target, item)
        elif isinstance(node, ast.arguments):
            names = [*node.posonlyargs, *node.args]
            given = [*zip(names[len(names) - len(node.defaults) :], node.defaults, strict=True)]
            for a, default in [*given, *zip(node.kwonlyargs, node.kw_defaults, strict=True)]:
                if default is not None:
                    yield ast.copy_location(ast.Name(a.arg, ast.Store()), a), default


def _pairs(target: ast.expr, value: ast.expr) -> Iterator[tuple[ast.expr, ast.expr]]:
    sides = (target, value)
    if all(isinstance(s, ast.Tuple | ast.List) for s in sides) and len(target.elts) == len(value.elts):  # type: ignore[attr-defined]
        for t, v in zip(target.elts, value.elts, strict=True):  # type: ignore[attr-defined]
            yield from _pairs(t, v)
    else:
        yield target, value


def elements(node: ast.expr) -> list[ast.expr]:
    """Return the items of a tuple, list, set or dict display, any of which an index may choose; else nothing."""
    if isinstance(node, ast.Tuple | ast.List | ast.Set):
        return node.elts
    return node.values if isinstance(node, ast.Dict) else []


class Folding:
    """The values of the constant expressions of one source, as strings or small integers.

    Args:
        bound: pairs of a target and the value assigned to it (``assignments``).
    """

    def __init__(self, bound: Iterable[tuple[ast.expr, ast.expr]]) -> None:
        self._names: dict[str, set[Value]] = defaultdict(set)
        self._memo: dict[ast.expr, set[Value]] = {}
        pairs = [(t.id, v) for t, v in bound if isinstance(t, ast.Name)]
        for _ in range(3):  # follows chains of up to three assignments
            for name, value in pairs:
                self._names[name] |= self.values(value)
                self._names[name] = set(itertools.islice(self._names[name], MAX_VALUES))
            self._memo.clear()

    def strings(self, node: ast.expr) -> list[str]:
        """Return the strings that an expression may be, sorted."""
        return sorted(v for v in self.values(node) if isinstance(v, str))

    def values(self, node: ast.expr) -> set[Value]:
        """Return the strings and integers that an expression may be; empty where the text does not say."""
        if node not in self._memo:
            self._memo[node] = set()  # ends the recursion of a name that is built from itself
            short = (v for v in self._fold(node) if not isinstance(v, str) or len(v) <= MAX_LENGTH)
            self._memo[node] = set(itertools.islice(short, MAX_VALUES))
        return self._memo[node]

    def _fold(self, node: ast.expr) -> Iterable[Value]:
        if isinstance(node, ast.Constant):
            return {node.value} if isinstance(node.value, str | int) else ()
        if isinstance(node, ast.Name):
            return self._names.get(node.id, ())
        if isinstance(node, ast.NamedExpr):
            return self.values(node.value)
        if isinstance(node, ast.IfExp):
            return self.values(node.body) | self.values(node.orelse)
        if isinstance(node, ast.JoinedStr):
            return self._joined("", [self._part(p) for p in node.values])
        if isinstance(node, ast.BinOp):
            return self._binary(node)
        if isinstance(node, ast.Subscript):
            return self._indexed(node)
        return self._called(node) if isinstance(node, ast.Call) and not node.keywords else ()

    def _part(self, node: ast.expr) -> set[Value]:
        if isinstance(node, ast.FormattedValue):
            plain = node.format_spec is None and node.conversion in (-1, ord("s"))
            return {str(v) for v in self.values(node.value)} if plain else set()
        return self.values(node)

    def _joined(self, between: str, parts: list[set[Value]]) -> Iterable[Value]:
        if len(parts) > MAX_LENGTH:
            return ()
        some = itertools.islice(itertools.product(*parts), MAX_VALUES)
        return [between.join(map(str, p)) for p in some]

    def _sum(self, node: ast.BinOp) -> Iterable[Value]:
        """Return the values of a sum, without recursion over its terms: a sum nests as deep as it is long."""
        terms: list[ast.expr] = []
        left: ast.expr = node
        while isinstance(left, ast.BinOp) and isinstance(left.op, ast.Add) and len(terms) < MAX_LENGTH:
            terms.append(left.right)
            left = left.left
        if len(terms) == MAX_LENGTH:
            return ()
        parts = [{v for v in self.values(t) if isinstance(v, str)} for t in (left, *reversed(terms))]
        return self._joined("", list(parts))  # type: ignore[arg-type]

    def _binary(self, node: ast.BinOp) -> Iterable[Value]:
        if isinstance(node.op, ast.Add):
            return self._sum(node)
        left = self.values(node.left)
        if isinstance(node.op, ast.Mod) and isinstance(node.right, ast.Tuple):
            return _filled(left, "%s", [self.values(e) for e in node.right.elts])
        right = self.values(node.right)
        if isinstance(node.op, ast.Mod):
            return _filled(left, "%s", [right])
        if isinstance(node.op, ast.Mult):
            return [a * b for a in left for b in right if isinstance(a, str) and isinstance(b, int) and b < MAX_LENGTH]
        return ()

    def _indexed(self, node: ast.Subscript) -> Iterable[Value]:
        items = elements(node.value)
        if items:
            return set().union(*(self.values(e) for e in items))
        texts = self.strings(node.value)
        if isinstance(node.slice, ast.Slice):
            bounds = [self._number(b) for b in (node.slice.lower, node.slice.upper, node.slice.step)]
            return [t[slice(*bounds)] for t in texts] if bounds[2] != 0 else ()
        at = self._number(node.slice)
        return [t[at] for t in texts if at is not None and -len(t) <= at < len(t)]

    def _number(self, node: ast.expr | None) -> int | None:
        minus = isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub)
        inner = node.operand if minus and isinstance(node, ast.UnaryOp) else node
        found = [v for v in self.values(inner) if isinstance(v, int)] if inner is not None else []
        return (-found[0] if minus else found[0]) if found else None

    def _called(self, node: ast.Call) -> Iterable[Value]:
        f = node.func
        if isinstance(f, ast.Name) and f.id in ("chr", "str") and len(node.args) == 1:
            inner = self.values(node.args[0])
            return [chr(v) for v in inner if isinstance(v, int) and 0 < v < 0x110000] if f.id == "chr" else inner
        if not isinstance(f, ast.Attribute):
            return ()
        if f.attr == "join" and len(node.args) == 1:
            sequence = self._sequence(node.args[0])
            return [v for s in self.strings(f.value) for v in self._joined(s, sequence)] if sequence else ()
        given = [self.values(a) for a in node.args]
        if f.attr == "format":
            return _filled(self.values(f.value), r"\{\d*\}", given)
        if f.attr not in _METHODS or len(given) > 2:
            return ()
        out = []
        for text in self.strings(f.value):
            for args in itertools.islice(itertools.product(*given), MAX_VALUES):
                try:
                    out.append(getattr(text, f.attr)(*args))
                except TypeError:
                    continue
        return out

    def _sequence(self, node: ast.expr) -> list[set[Value]]:
        if isinstance(node, ast.Tuple | ast.List):
            return [self.values(e) for e in node.elts]
        if isinstance(node, ast.Call) and len(node.args) == 1 and isinstance(node.func, ast.Name):
            inner = self._sequence(node.args[0])
            return inner[::-1] if node.func.id == "reversed" else inner if node.func.id in ("list", "tuple") else []
        texts = self.strings(node)
        return [{c} for c in texts[0]] if texts else []


def _filled(texts: Iterable[Value], field: str, parts: list[set[Value]]) -> Iterable[Value]:
    """Return texts with their plain fields filled; nothing for a text with widths or other format options."""
    out: list[Value] = []
    for text in texts:
        if not isinstance(text, str) or re.search(r"[%{}]", re.sub(field, "", text)):
            continue
        for args in itertools.islice(itertools.product(*parts), MAX_VALUES):
            try:
                out.append(text % args if field == "%s" else text.format(*args))
            except (TypeError, ValueError, IndexError):
                continue
    return out
