"""The tunable numbers of a kernel's source: found by reading it, changed in place, nothing else touched."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from kbx_env.baselines.search import ties

from kbx_env.errors import UnknownName, UsageError

KINDS = ("block", "group", "stages", "warps")
WARPS, STAGES = (1, 2, 4, 8, 16), (1, 2, 3, 4, 5)
BLOCK_LEAST, BLOCK_MOST, FACTOR = 16, 8192, 8
GROUP_MOST = 64
_NAMES = (
    ("warps", re.compile(r"(num_|n_)?warps|num_?warps|NUM_WARPS|WARPS|\w+_warps")),
    ("stages", re.compile(r"(num_|n_)?stages|NUM_STAGES|STAGES|\w+_stages")),
    ("group", re.compile(r"GROUP(_SIZE)?(_?[A-Z])?|group_(size_)?m")),
    ("block", re.compile(r"B[A-Z]{1,2}\d?|(BLOCK|TILE|CHUNK)(_?[A-Z0-9]\w*)?|(block|tile)(_\w+)?|\w+_(BLOCK|TILE|block|tile)")),
)  # fmt: skip
_PICKS = ("min", "max", "_least", "_most")
"""Functions that return one of their arguments."""


@dataclass(frozen=True)
class Knob:
    """One number that may be changed without changing what a kernel means.

    ``name`` is unique in its source and stays the same when numbers change: where the number stands, what it is called, and
    its line. ``kind`` is one of ``KINDS``. ``choices`` hold the present ``value``. ``spots`` are the bytes of the source that
    spell it: more than one where the grid repeats a block size.
    """

    name: str
    kind: str
    value: int
    choices: tuple[int, ...]
    spots: tuple[tuple[int, int], ...]


def kind_of(name: str) -> str | None:
    """What a name says of its number."""
    return next((kind for kind, pattern in _NAMES if pattern.fullmatch(name)), None)


def choices_of(kind: str, value: int) -> tuple[int, ...]:
    """The values to choose from: powers of two around the present one, which is always among them."""
    if kind == "warps":
        found = set(WARPS)
    elif kind == "stages":
        found = set(STAGES)
    elif kind == "group":
        found = {2**k for k in range(GROUP_MOST.bit_length())}
    else:
        low, high = max(min(BLOCK_LEAST, value), value // FACTOR), min(max(BLOCK_MOST, value), value * FACTOR)
        found = {2**k for k in range(high.bit_length()) if low <= 2**k <= high}
    return tuple(sorted(found | {value}))


def knobs_of(source: str) -> tuple[Knob, ...]:
    """The knobs of a source, in its order; it is parsed, never run.

    Raises:
        UsageError: the source is no Python.
    """
    return _Reader(source).knobs()


def with_knobs(source: str, settings: Mapping[str, int]) -> str:
    """The source with other numbers; every other byte stays.

    Raises:
        UnknownName: no such knob.
        UsageError: a value that is not among the knob's choices, or a source that is no Python.
    """
    known = {k.name: k for k in knobs_of(source)}
    data, edits = source.encode(), []
    for name, value in settings.items():
        if name not in known:
            raise UnknownName("knob", name, known)
        knob = known[name]
        if type(value) is not int or value not in knob.choices:
            raise UsageError(f"knob {name!r} is {value!r}; accepted: {', '.join(map(str, knob.choices))}")
        edits += [(start, end, value) for start, end in knob.spots]
    for start, end, value in sorted(edits, reverse=True):
        data = data[:start] + str(value).encode() + data[end:]
    text = data.decode()
    ast.parse(text)
    return text


@dataclass
class _Found:
    owner: str
    key: str
    kind: str
    nodes: list[ast.Constant]


class _Reader:
    """Reads one source."""

    def __init__(self, source: str) -> None:
        try:
            self.tree = ast.parse(source)
        except (SyntaxError, ValueError) as e:
            raise UsageError(f"the source is no Python: {e}") from e
        self.data = source.encode()
        self.lines = [0, *(m.end() for m in re.finditer(rb"\r\n|\r|\n", self.data))]
        self.kernels = {n.name: n for n in ast.walk(self.tree) if isinstance(n, ast.FunctionDef) and ties.jitted(n)}
        self.tiles = {name: ties.tiles_of(node) for name, node in self.kernels.items()}
        self.found: list[_Found] = []
        self.fixed: set[int] = set()
        """Literals that must stay: block sizes whose grid is not understood."""

    def knobs(self) -> tuple[Knob, ...]:
        """All of them."""
        self._scope("module", self.tree.body)
        knobs: list[Knob] = []
        taken: set[tuple[int, int]] = set()
        seen: dict[str, int] = {}
        for f in self._joined():
            spots = tuple(sorted(s for n in f.nodes if (s := self._spot(n)) is not None))
            if len(spots) != len(f.nodes) or taken & set(spots):
                continue
            taken |= set(spots)
            value = f.nodes[0].value
            assert type(value) is int
            name = f"{f.owner}.{f.key}@{f.nodes[0].lineno}"
            seen[name] = seen.get(name, 0) + 1
            name += f".{seen[name]}" if seen[name] > 1 else ""
            knobs.append(Knob(name, f.kind, value, choices_of(f.kind, value), spots))
        return tuple(sorted(knobs, key=lambda k: k.spots[0]))

    def _joined(self) -> list[_Found]:
        """Finds that share a literal become one; literals that must stay drop out."""
        groups: list[_Found] = []
        for f in self.found:
            f = _Found(f.owner, f.key, f.kind, list(f.nodes))
            for g in [g for g in groups if {id(n) for n in g.nodes} & {id(n) for n in f.nodes}]:
                groups.remove(g)
                mine = {id(n) for n in g.nodes}
                f = _Found(g.owner, g.key, g.kind, g.nodes + [n for n in f.nodes if id(n) not in mine])
            groups.append(f)
        return [g for g in groups if not self.fixed & {id(n) for n in g.nodes}]

    def _spot(self, node: ast.Constant) -> tuple[int, int] | None:
        """Where a literal stands; ``None`` where it is not spelt in plain digits."""
        assert node.end_lineno is not None and node.end_col_offset is not None
        start = self.lines[node.lineno - 1] + node.col_offset
        end = self.lines[node.end_lineno - 1] + node.end_col_offset
        return (start, end) if self.data[start:end] == str(node.value).encode() else None

    def _add(self, owner: str, key: str, kind: str, nodes: Iterable[ast.Constant]) -> None:
        for node in nodes:
            self.found.append(_Found(owner, key, kind, [node]))

    def _scope(self, owner: str, body: Iterable[ast.stmt]) -> None:
        """One function's own statements, or the module's; functions on the device hold no knobs of the host."""
        nodes = list(_own(body))
        assigned: dict[str, list[ast.expr]] = {}
        unpacked: dict[int, list[str]] = {}
        for n in nodes:
            for target, value in _bindings(n):
                if isinstance(target, ast.Name):
                    assigned.setdefault(target.id, []).append(value)
                elif isinstance(target, ast.Tuple) and all(isinstance(t, ast.Name) for t in target.elts):
                    unpacked.setdefault(len(target.elts), [t.id for t in target.elts if isinstance(t, ast.Name)])
        kinds = self._passed(nodes)
        for n in nodes:
            if isinstance(n, ast.Call):
                self._call(owner, n, assigned)
            elif isinstance(n, ast.Dict):
                for k, v in zip(n.keys, n.values, strict=True):
                    if isinstance(k, ast.Constant) and isinstance(k.value, str) and (kind := kind_of(k.value)):
                        self._add(owner, k.value, kind, _values(v, kind))
            elif isinstance(n, ast.Return) and n.value is not None and (kind := kind_of(owner)):
                self._add(owner, "return", kind, _values(n.value, kind))
            elif isinstance(n, ast.FunctionDef) and not ties.jitted(n):
                self._defaults(n)
                self._scope(n.name, n.body)
            for target, value in _bindings(n):
                self._bound(owner, target, value, kinds, unpacked)
            if isinstance(n, ast.For):
                self._table(owner, n.iter, unpacked)

    def _passed(self, nodes: Iterable[ast.AST]) -> dict[str, str]:
        """Kinds of names by the parameters that they are handed to."""
        kinds = {}
        for n in nodes:
            if isinstance(n, ast.Call) and isinstance(n.func, ast.Subscript):
                for k in n.keywords:
                    kind = self._parameter(n, k.arg)
                    if isinstance(k.value, ast.Name) and kind:
                        kinds[k.value.id] = kind
        return kinds

    def _kernel(self, call: ast.Call) -> str | None:
        launched = call.func.value if isinstance(call.func, ast.Subscript) else None
        return launched.id if isinstance(launched, ast.Name) and launched.id in self.kernels else None

    def _parameter(self, call: ast.Call, name: str | None) -> str | None:
        """The kind of a parameter of a launch."""
        if name is None:
            return None
        return kind_of(name) or ("block" if name in self.tiles.get(self._kernel(call) or "", ()) else None)

    def _call(self, owner: str, call: ast.Call, assigned: Mapping[str, list[ast.expr]]) -> None:
        """Keyword arguments of launches, of ``triton.Config`` and of the host's own functions."""
        launch = isinstance(call.func, ast.Subscript)
        name = self._kernel(call) or (ast.unparse(call.func.value) if isinstance(call.func, ast.Subscript) else owner)
        found = {k.arg: (kind, k.value) for k in call.keywords if k.arg and (kind := self._parameter(call, k.arg))}
        blocks = {
            k: v for k, (kind, v) in found.items()
            if launch and kind == "block" and isinstance(v, ast.Constant) and (ties.power(v) or 0) > 1
        }  # fmt: skip
        changing = ties.tied(call, blocks, assigned, self.kernels.get(self._kernel(call) or "")) if blocks else {}
        for key, (kind, value) in found.items():
            if key not in blocks:
                self._add(name, key, kind, _values(value, kind))
            elif changing and key in changing:
                self.found.append(_Found(name, key, kind, changing[key]))
            else:
                self.fixed.add(id(blocks[key]))

    def _defaults(self, function: ast.FunctionDef) -> None:
        """Default arguments, but not what a published signature may call a block: plain ``block``, or capitals."""
        a = function.args
        named = [*zip(a.args[len(a.args) - len(a.defaults) :], a.defaults, strict=True)]
        named += [(p, d) for p, d in zip(a.kwonlyargs, a.kw_defaults, strict=True) if d is not None]
        for p, default in named:
            kind = kind_of(p.arg)
            if kind and (p.arg.isupper() or p.arg in ("block", "tile", "warps", "num_warps", "num_stages")):
                self._add(function.name, p.arg, kind, _values(default, kind))

    def _bound(
        self, owner: str, target: ast.expr, value: ast.expr, kinds: Mapping[str, str], unpacked: Mapping[int, list[str]]
    ) -> None:
        """Numbers that a name is bound to."""
        if isinstance(target, ast.Name):
            kind = kind_of(target.id) or kinds.get(target.id)
            if kind:
                self._add(owner, target.id, kind, _values(value, kind))
            self._table(owner, value, unpacked)
        elif isinstance(target, ast.Tuple):
            for row in _rows(value, len(target.elts)):
                for t, v in zip(target.elts, row.elts, strict=True):
                    if isinstance(t, ast.Name) and (kind := kind_of(t.id) or kinds.get(t.id)):
                        self._add(owner, t.id, kind, _values(v, kind))

    def _table(self, owner: str, value: ast.expr, unpacked: Mapping[int, list[str]]) -> None:
        """Rows of numbers whose columns get their names where a row is unpacked in the same function."""
        for size, names in unpacked.items():
            for row in _rows(value, size, nested=True):
                for name, v in zip(names, row.elts, strict=True):
                    if kind := kind_of(name):
                        self._add(owner, name, kind, _values(v, kind))


def _own(body: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """All nodes in the source's order; of a nested function only itself, its decorators and its defaults."""
    for node in body:
        yield node
        if isinstance(node, ast.FunctionDef):
            yield from _own([*node.decorator_list, *node.args.defaults])
        else:
            yield from _own(ast.iter_child_nodes(node))


def _bindings(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    if isinstance(node, ast.Assign):
        yield from ((target, node.value) for target in node.targets)
    elif isinstance(node, ast.AnnAssign | ast.NamedExpr) and node.value is not None:
        yield node.target, node.value
    elif isinstance(node, ast.For):
        yield node.target, node.iter


def _values(node: ast.expr, kind: str) -> Iterator[ast.Constant]:
    """Literals that may become the value of an expression, or scale it: no conditions, no thresholds."""
    if isinstance(node, ast.Constant):
        value = node.value
        whole = value if kind == "stages" and type(value) is int else ties.power(node)
        if whole is not None and whole > (kind == "block"):
            yield node
    elif isinstance(node, ast.IfExp):
        yield from (*_values(node.body, kind), *_values(node.orelse, kind))
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _PICKS:
        for a in node.args:
            yield from _values(a, kind)
    elif kind == "block" and isinstance(node, ast.BinOp) and isinstance(node.op, ast.FloorDiv):
        yield from _values(node.left, kind)
    elif kind == "block" and isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        yield from (*_values(node.left, kind), *_values(node.right, kind))


def _rows(node: ast.expr, size: int, nested: bool = False) -> Iterator[ast.Tuple]:
    """Tuples of a length that an expression may be; with ``nested``, also its elements."""
    if isinstance(node, ast.IfExp):
        yield from (*_rows(node.body, size, nested), *_rows(node.orelse, size, nested))
    elif nested and isinstance(node, ast.Tuple | ast.List) and any(isinstance(e, ast.Tuple) for e in node.elts):
        for e in node.elts:
            yield from _rows(e, size)
    elif isinstance(node, ast.Tuple) and len(node.elts) == size and not nested:
        yield node
