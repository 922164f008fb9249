"""Finds the tunable numbers (knobs) of a kernel's source by parsing it, and changes them in place."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from kbx_env.baselines.search import ties

from kbx_env.errors import UnknownName, UsageError

KINDS = ("block", "group", "stages", "warps")
WARPS, STAGES = (1, 2, 4, 8, 16), (1, 2, 3, 4, 5)
"""Choices of every knob of these kinds."""
BLOCK_LEAST, BLOCK_MOST, FACTOR = 16, 8192, 8
"""Range of block sizes; a choice differs from the present value at most by the factor."""
GROUP_MOST = 64
"""Largest group of program rows."""
_NAMES = (
    ("warps", re.compile(r"(num_|n_)?warps|num_?warps|NUM_WARPS|WARPS|\w+_warps")),
    ("stages", re.compile(r"(num_|n_)?stages|NUM_STAGES|STAGES|\w+_stages")),
    ("group", re.compile(r"GROUP(_SIZE)?(_?[A-Z])?|group_(size_)?m")),
    ("block", re.compile(r"B[A-Z]{1,2}\d?|(BLOCK|TILE|CHUNK)(_?[A-Z0-9]\w*)?|(block|tile)(_\w+)?|\w+_(BLOCK|TILE|block|tile)")),
)  # fmt: skip
"""Kind of a knob, and the names that parameters, variables and functions of this kind have; the first match counts."""
_PICKS = ("min", "max", "_least", "_most")
"""Functions that return one of their arguments."""


@dataclass(frozen=True)
class Knob:
    """A number of a kernel's source that may be changed without a change of the result.

    Attributes:
        name: unique within the source, and the same after numbers have changed: ``owner.name@line``, where the owner is
            the function, the launched kernel, or ``module``.
        kind: one of ``KINDS``.
        value: the present value.
        choices: the accepted values in increasing order; the present one is among them.
        spots: begin and end, in bytes of the UTF-8 source, of the literals with this number: more than one where the
            grid repeats a block size.
    """

    name: str
    kind: str
    value: int
    choices: tuple[int, ...]
    spots: tuple[tuple[int, int], ...]


def kind_of(name: str) -> str | None:
    """Return the kind of number that a name stands for, one of ``KINDS``; ``None`` for other names."""
    return next((kind for kind, pattern in _NAMES if pattern.fullmatch(name)), None)


def choices_of(kind: str, value: int) -> tuple[int, ...]:
    """Return the accepted values of a knob in increasing order.

    Args:
        kind: one of ``KINDS``.
        value: the present value, which is always accepted.

    Returns:
        ``WARPS`` or ``STAGES``, else powers of two: for blocks from 1/8 to 8 times the present value, within 16 to
        8192.
    """
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
    """Find the knobs of a source. It is parsed, and not executed.

    Args:
        source: a module with kernels.

    Returns:
        The knobs, in the order of the source.

    Raises:
        UsageError: the source is not Python.
    """
    return _Reader(source).knobs()


def with_knobs(source: str, settings: Mapping[str, int]) -> str:
    """Set knobs of a source; every other byte stays the same.

    Args:
        source: a module with kernels.
        settings: values by name of the knob.

    Returns:
        The changed source.

    Raises:
        UnknownName: there is no such knob.
        UsageError: a value is not among the knob's choices, or the source is not Python.
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
class _Candidate:
    """A number that may become a knob: its literals, the name that it is bound to, and the owner of that name."""

    owner: str
    key: str
    kind: str
    nodes: list[ast.Constant]


class _Reader:
    """Finds the knobs of one source.

    Args:
        source: a module with kernels.

    Attributes:
        lines: byte at which each line begins.
        kernels: the functions that run on the device, by name.
        tiles: their parameters that are arguments of ``tl.arange``.
        found: the candidates so far.
        fixed: ids of literals that must keep their value: block sizes whose grid is not understood.
    """

    def __init__(self, source: str) -> None:
        try:
            self.tree = ast.parse(source)
        except (SyntaxError, ValueError) as e:
            raise UsageError(f"the source is no Python: {e}") from e
        self.data = source.encode()
        self.lines = [0, *(m.end() for m in re.finditer(rb"\r\n|\r|\n", self.data))]
        self.kernels = {n.name: n for n in ast.walk(self.tree) if isinstance(n, ast.FunctionDef) and ties.jitted(n)}
        self.tiles = {name: ties.tiles_of(node) for name, node in self.kernels.items()}
        self.found: list[_Candidate] = []
        self.fixed: set[int] = set()

    def knobs(self) -> tuple[Knob, ...]:
        """Return all knobs, in the order of the source."""
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

    def _joined(self) -> list[_Candidate]:
        """Join candidates that share a literal, and leave out those with a literal that must keep its value."""
        groups: list[_Candidate] = []
        for f in self.found:
            f = _Candidate(f.owner, f.key, f.kind, list(f.nodes))
            for g in [g for g in groups if {id(n) for n in g.nodes} & {id(n) for n in f.nodes}]:
                groups.remove(g)
                ids = {id(n) for n in g.nodes}
                f = _Candidate(g.owner, g.key, g.kind, g.nodes + [n for n in f.nodes if id(n) not in ids])
            groups.append(f)
        return [g for g in groups if not self.fixed & {id(n) for n in g.nodes}]

    def _spot(self, node: ast.Constant) -> tuple[int, int] | None:
        """Return begin and end of a literal in bytes; ``None`` if it is not written in plain decimal digits."""
        assert node.end_lineno is not None and node.end_col_offset is not None
        start = self.lines[node.lineno - 1] + node.col_offset
        end = self.lines[node.end_lineno - 1] + node.end_col_offset
        return (start, end) if self.data[start:end] == str(node.value).encode() else None

    def _add(self, owner: str, key: str, kind: str, nodes: Iterable[ast.Constant]) -> None:
        for node in nodes:
            self.found.append(_Candidate(owner, key, kind, [node]))

    def _scope(self, owner: str, body: Iterable[ast.stmt]) -> None:
        """Read the statements of a host function, or of the module; kernels are left out.

        Args:
            owner: name of the function, or ``module``.
            body: its statements.
        """
        nodes = list(_own(body))
        assigned, unpacked = _assignments(nodes)
        kinds = self._passed(nodes)
        for n in nodes:
            if isinstance(n, ast.Call):
                self._call(owner, n, assigned)
            elif isinstance(n, ast.Dict):
                self._dict(owner, n)
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
        """Return the kinds of variables that are arguments of launches, by name, from the parameters' names."""
        kinds = {}
        for n in nodes:
            if isinstance(n, ast.Call) and isinstance(n.func, ast.Subscript):
                for k in n.keywords:
                    kind = self._parameter(n, k.arg)
                    if isinstance(k.value, ast.Name) and kind:
                        kinds[k.value.id] = kind
        return kinds

    def _dict(self, owner: str, node: ast.Dict) -> None:
        """Read a dict: its keys may name the numbers."""
        for k, v in zip(node.keys, node.values, strict=True):
            if isinstance(k, ast.Constant) and isinstance(k.value, str) and (kind := kind_of(k.value)):
                self._add(owner, k.value, kind, _values(v, kind))

    def _kernel(self, call: ast.Call) -> str | None:
        """Return the name of the kernel that a call launches; ``None`` for other calls."""
        launched = call.func.value if isinstance(call.func, ast.Subscript) else None
        return launched.id if isinstance(launched, ast.Name) and launched.id in self.kernels else None

    def _parameter(self, call: ast.Call, name: str | None) -> str | None:
        """Return the kind of the parameter of a launch, from its name or from its use in ``tl.arange``."""
        if name is None:
            return None
        return kind_of(name) or ("block" if name in self.tiles.get(self._kernel(call) or "", ()) else None)

    def _call(self, owner: str, call: ast.Call, assigned: Mapping[str, list[ast.expr]]) -> None:
        """Read the keyword arguments of a launch, of ``triton.Config``, or of a call of a host function."""
        launch = isinstance(call.func, ast.Subscript)
        name = self._kernel(call) or (ast.unparse(call.func.value) if isinstance(call.func, ast.Subscript) else owner)
        found = {k.arg: (kind, k.value) for k in call.keywords if k.arg and (kind := self._parameter(call, k.arg))}
        blocks = {
            k: v for k, (kind, v) in found.items()
            if launch and kind == "block" and isinstance(v, ast.Constant) and (ties.power(v) or 0) > 1
        }  # fmt: skip
        kernel = self.kernels.get(self._kernel(call) or "")
        changing = ties.tied(call, blocks, assigned, kernel) if blocks else {}
        for key, (kind, value) in found.items():
            if key not in blocks:
                self._add(name, key, kind, _values(value, kind))
            elif changing and key in changing:
                self.found.append(_Candidate(name, key, kind, changing[key]))
            else:
                self.fixed.add(id(blocks[key]))

    def _defaults(self, function: ast.FunctionDef) -> None:
        """Read default arguments of a function, but only of parameters in capitals or with one of a few usual names.

        A parameter with another name may belong to a published signature.
        """
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
        """Read the numbers that are bound to a name, or to the names of a tuple.

        Args:
            owner: name of the function, or ``module``.
            target: what is bound.
            value: the value.
            kinds: kinds of variables by name, as their use in launches shows.
            unpacked: names to which tuples are unpacked, by length.
        """
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
        """Read a table of tuples; the names of its columns are those to which the function unpacks such a tuple."""
        for size, names in unpacked.items():
            for row in _rows(value, size, nested=True):
                for name, v in zip(names, row.elts, strict=True):
                    if kind := kind_of(name):
                        self._add(owner, name, kind, _values(v, kind))


def _own(body: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """Yield all nodes in the source's order; of a nested function only the node itself, its decorators and defaults."""
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


def _assignments(nodes: Iterable[ast.AST]) -> tuple[dict[str, list[ast.expr]], dict[int, list[str]]]:
    """Return the values that are assigned to each name, and the names to which tuples are unpacked, by length."""
    assigned: dict[str, list[ast.expr]] = {}
    unpacked: dict[int, list[str]] = {}
    for n in nodes:
        for target, value in _bindings(n):
            if isinstance(target, ast.Name):
                assigned.setdefault(target.id, []).append(value)
            elif isinstance(target, ast.Tuple) and all(isinstance(t, ast.Name) for t in target.elts):
                unpacked.setdefault(len(target.elts), [t.id for t in target.elts if isinstance(t, ast.Name)])
    return assigned, unpacked


def _values(node: ast.expr, kind: str) -> Iterator[ast.Constant]:
    """Yield the literals that an expression may evaluate to or is scaled by, but not those in conditions."""
    if isinstance(node, ast.Constant):
        value = node.value
        number = value if kind == "stages" and type(value) is int else ties.power(node)
        if number is not None and number > (kind == "block"):
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
    """Yield the tuples of a length that an expression may evaluate to, or contain (``nested``)."""
    if isinstance(node, ast.IfExp):
        yield from (*_rows(node.body, size, nested), *_rows(node.orelse, size, nested))
    elif nested and isinstance(node, ast.Tuple | ast.List) and any(isinstance(e, ast.Tuple) for e in node.elts):
        for e in node.elts:
            yield from _rows(e, size)
    elif isinstance(node, ast.Tuple) and len(node.elts) == size and not nested:
        yield node
