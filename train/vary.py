"""Other spellings of a kernel: new names, no comments, other block sizes. What it means stays, which a grader then proves.

Names are changed module-wide by one map onto fresh names, so no scope has to be understood: a name is left alone wherever
text, keywords or ``**`` could refer to it. The entry function and its parameters are the contract and never change.
"""

from __future__ import annotations

import ast
import builtins
import functools
import io
import keyword
import random
import re
import tokenize
from collections.abc import Iterator, Mapping, Sequence

from kbx_env.baselines.search.knobs import knobs_of, with_knobs
from kbx_env.baselines.search.ties import jitted

CHANGED = 3
"""Numbers of a kernel that one variation changes at most."""
SHARE = 0.75
"""Of the names that may change, how many do."""
_WORDS = {
    "x": ("x_ptr", "inp", "src", "input_ptr"), "y": ("y_ptr", "dst", "out_ptr", "result_ptr"), "w": ("weights", "w_ptr"),
    "n": ("size", "numel", "n_elements", "length"), "i": ("idx", "offs", "offset"), "j": ("col", "jdx"), "k": ("kdx", "inner"),
    "m": ("rows", "row_offs"), "a": ("lhs", "left"), "b": ("rhs", "right"), "acc": ("total", "accum", "accumulator"),
    "inside": ("mask", "valid", "in_bounds"), "mask": ("inside", "valid", "keep"), "row": ("r_id", "row_id", "line"),
    "s": ("scale", "s_val"), "t": ("t_val", "shift"), "out": ("res", "dest"), "result": ("res", "value"), "v": ("val", "vals"),
    "BLOCK": ("BLOCK_SIZE", "TILE", "CHUNK"), "BM": ("BLOCK_M", "TILE_M"), "BN": ("BLOCK_N", "TILE_N"), "BK": ("BLOCK_K", "TILE_K"),
    "pid": ("program", "block_id"), "grid": ("launch_grid", "blocks"), "offs": ("idx", "positions"), "base": ("start", "origin"),
}  # fmt: skip
_KERNELS = ("{}_kernel", "_{}_kernel", "kernel_{}", "{}_fwd_kernel", "triton_{}", "_{}_impl")
_FUNCTIONS = ("_{}", "{}_fn", "run_{}", "do_{}", "compute_{}", "{}_helper")
_VALUES = ("{}_", "{}_val", "my_{}", "{}0", "cur_{}", "the_{}", "{}_v")
_CONSTANTS = ("{}_", "{}_C", "N_{}", "{}0", "K_{}")


def renamed(source: str, entry: str, seed: int | str) -> str:
    """The source with other names and without comments and docstrings; the same for the same seed.

    Args:
        source: Python.
        entry: the function whose name and parameters stay.
        seed: of the choice of names.

    Raises:
        SyntaxError: the source is no Python.
    """
    source = _bare(source)
    tree = ast.parse(source)
    reader = _Names(tree, entry)
    return _edited(source, _places(source, tree, reader), _map(reader, random.Random(f"{seed} names"), source))


def with_contract(source: str, entry: str, names: Mapping[str, str]) -> str | None:
    """The source with other names for its entry function and that function's parameters; ``None`` where they cannot change.

    Args:
        source: Python.
        entry: the function of the contract.
        names: old names, the entry's and its parameters', and new ones that the source does not have.

    Raises:
        SyntaxError: the source is no Python.
    """
    free, known, edits = _contract(source, entry)
    if not set(names) <= free or known & set(names.values()) or len(set(names.values())) < len(names):
        return None
    return _edited(source, edits, names)


@functools.lru_cache(maxsize=8)
def _contract(source: str, entry: str) -> tuple[frozenset[str], frozenset[str], list[tuple[int, int, str]]]:
    """Names that may change, the entry's and its parameters' among them; names that are taken; where names stand."""
    tree = ast.parse(source)
    mine = {entry, *(p for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == entry for p in _parameters(n))}
    reader = _Names(tree, None, frozenset(mine))
    known = reader.bound | reader.imported | {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)}
    return frozenset(reader.free), frozenset(known), _places(source, tree, reader)


def _places(source: str, tree: ast.Module, reader: _Names) -> list[tuple[int, int, str]]:
    """Where names stand, last first."""
    edits: list[tuple[int, int, str]] = []  # line, byte, old name
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            edits.append((node.lineno, node.col_offset, node.id))
        elif isinstance(node, ast.arg | ast.keyword) and node.arg is not None:
            if isinstance(node, ast.arg) or id(node) in reader.ours:
                edits.append((node.lineno, node.col_offset, node.arg))
    lines = source.splitlines(keepends=True)
    for row, column, name in _defined(source):
        edits.append((row, len(lines[row - 1][:column].encode()), name))
    return sorted(set(edits), reverse=True)


def _edited(source: str, edits: Sequence[tuple[int, int, str]], names: Mapping[str, str]) -> str:
    data = [line.encode() for line in source.splitlines(keepends=True)]
    for row, column, old in edits:
        if old in names:
            line = data[row - 1]
            assert line[column : column + len(old.encode())] == old.encode(), (row, column, old)
            data[row - 1] = line[:column] + names[old].encode() + line[column + len(old.encode()) :]
    text = b"".join(data).decode()
    ast.parse(text)
    return text


def retuned(source: str, seed: int | str) -> str | None:
    """The source with up to ``CHANGED`` other block sizes, warps or stages; ``None`` where it has no such number."""
    knobs = [k for k in knobs_of(source) if len(k.choices) > 1]
    if not knobs:
        return None
    draw = random.Random(f"{seed} knobs")
    some = draw.sample(knobs, draw.randint(1, min(CHANGED, len(knobs))))
    # A step or two away: what is far from a kernel tuned by hand mostly does not fit on the device.
    chosen = {}
    for k in some:
        at = k.choices.index(k.value)
        near = [v for v in k.choices[max(0, at - 2) : at + 3] if v != k.value]
        chosen[k.name] = draw.choice(near)
    return with_knobs(source, chosen)


def variations(source: str, entry: str, count: int, seed: int | str) -> list[tuple[str, str]]:
    """``count`` different (name, source) beside the source itself, fewer where it has no more.

    Names of variations say what was done: ``names``, ``knobs`` or ``both``, and the number of the draw.
    """
    found: list[tuple[str, str]] = []
    seen = {source}
    for draw in range(4 * count):
        if len(found) == count:
            break
        kind, own = ("names", "knobs", "both")[draw % 3], f"{seed} {draw}"
        text = source if kind == "names" else retuned(source, own)
        if text is None:
            continue
        text = text if kind == "knobs" else renamed(text, entry, own)
        if text not in seen:
            seen.add(text)
            found.append((f"{kind}-{draw}", text))
    return found


class _Names:
    """What a module binds, and which of its names may change."""

    def __init__(self, tree: ast.Module, entry: str | None, mine: frozenset[str] = frozenset()) -> None:
        """``entry`` and its parameters are fixed, if it is given; names ``mine`` are the module's own, builtins or not."""
        self.functions: dict[str, list[ast.FunctionDef]] = {}
        self.bound: set[str] = set()
        self.fixed: set[str] = {*(set(dir(builtins)) - mine), *keyword.kwlist, *keyword.softkwlist}
        if entry is not None:
            self.fixed.add(entry)
        self.imported: set[str] = set()
        self.ours: set[int] = set()
        """Keywords (by ``id``) that name a parameter of a function of this module."""
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                self.functions.setdefault(node.name, []).append(node)
                self.bound.add(node.name)
        for node in ast.walk(tree):
            self._look(node, entry)
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                self._call(node)

    @property
    def free(self) -> list[str]:
        """The names that may change, sorted."""
        return sorted(n for n in self.bound - self.fixed - self.imported if not n.startswith("__"))

    def _look(self, node: ast.AST, entry: str | None) -> None:
        if isinstance(node, ast.arg):
            self.bound.add(node.arg)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            self.bound.add(node.id)
        elif isinstance(node, ast.FunctionDef) and node.name == entry:
            self.fixed |= set(_parameters(node))
        elif isinstance(node, ast.Import | ast.ImportFrom):
            self.imported |= {(a.asname or a.name).split(".")[0] for a in node.names}
        elif isinstance(node, ast.Global | ast.Nonlocal):
            self.fixed |= set(node.names)
        elif isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar) and node.name:
            self.fixed.add(node.name)
        elif isinstance(node, ast.MatchMapping) and node.rest:
            self.fixed.add(node.rest)
        elif isinstance(node, ast.AsyncFunctionDef):
            self.fixed |= {node.name, *_parameters(node)}
        elif isinstance(node, ast.ClassDef | ast.JoinedStr):
            # Attributes, and places that Python 3.11 does not tell.
            self.fixed |= {n.id for n in ast.walk(node) if isinstance(n, ast.Name)} | _inner(node)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            self.fixed |= set(re.findall(r"\w+", node.value))  # keys of a configuration, names for getattr

    def _call(self, call: ast.Call) -> None:
        keywords = {k.arg for k in call.keywords if k.arg is not None}
        called = call.func.value if isinstance(call.func, ast.Subscript) else call.func
        if isinstance(called, ast.Name) and called.id in self.functions:
            for k in call.keywords:
                takers = [k.arg in _parameters(f) for f in self.functions[called.id]]
                if all(takers):
                    self.ours.add(id(k))
                elif any(takers) or any(f.args.kwarg for f in self.functions[called.id]):
                    self.fixed.add(k.arg or "")
            return
        root = called
        while isinstance(root, ast.Attribute | ast.Subscript | ast.Call):
            root = root.func if isinstance(root, ast.Call) else root.value
        outside = isinstance(root, ast.Name) and (root.id in self.imported or root.id in dir(builtins))
        handed = any(isinstance(a, ast.Name) and a.id in self.functions for a in call.args)
        methods = isinstance(called, ast.Attribute) and not (isinstance(root, ast.Name) and root.id in self.functions)
        # dict(BLOCK=4) makes a key; partial(kernel, BLOCK=4) and f(BLOCK=4) may name a parameter of ours.
        if handed or not (outside or methods) or (isinstance(called, ast.Name) and called.id == "dict"):
            self.fixed |= keywords


def _inner(node: ast.AST) -> set[str]:
    found = {node.name} if isinstance(node, ast.ClassDef) else set()
    for f in ast.walk(node):
        if isinstance(f, ast.FunctionDef):
            found |= {f.name, *_parameters(f)}
    return found


def _parameters(f: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    a = f.args
    more = [x.arg for x in (a.vararg, a.kwarg) if x is not None]
    return [x.arg for x in (*a.posonlyargs, *a.args, *a.kwonlyargs)] + more


def _map(reader: _Names, draw: random.Random, source: str) -> dict[str, str]:
    taken = set(re.findall(r"\w+", source)) | reader.fixed | reader.imported
    names: dict[str, str] = {}
    for old in reader.free:
        if draw.random() > SHARE:
            continue
        plain = old.strip("_") or "v"
        if old in reader.functions:
            forms: tuple[str, ...] = _KERNELS if any(jitted(f) for f in reader.functions[old]) else _FUNCTIONS
        else:
            forms = _CONSTANTS if plain.isupper() else _VALUES
        options = [*_WORDS.get(old, ()), *(form.format(plain) for form in forms), *(f"{plain}_{k}" for k in range(2, 200))]
        likely = options[: len(_WORDS.get(old, ())) or len(forms)]
        draw.shuffle(likely)
        names[old] = next(o for o in [*likely, *options] if o not in taken and o.isidentifier())
        taken.add(names[old])
    return names


def _defined(source: str) -> Iterator[tuple[int, int, str]]:
    """Line, column and name of every function that is defined: the tree tells where ``def`` stands, not the name."""
    before = ""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.NAME and before == "def":
            yield (*token.start, token.string)
        before = token.string


def _bare(source: str) -> str:
    """The source without comments and docstrings, which would name what has changed."""
    lines = source.splitlines(keepends=True)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            kept = lines[row - 1][:column].rstrip()
            lines[row - 1] = kept + "\n" if kept else ""
    gone: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.FunctionDef | ast.ClassDef) and ast.get_docstring(node, clean=False) is not None:
            said = node.body[0]
            alone = source.splitlines()[said.lineno - 1][: said.col_offset].strip() == ""
            if alone and (len(node.body) > 1 or isinstance(node, ast.Module)):
                gone |= set(range(said.lineno, (said.end_lineno or said.lineno) + 1))
    text = "".join(line for row, line in enumerate(lines, 1) if row not in gone)
    return re.sub(r"\n{4,}", "\n\n\n", text).strip("\n") + "\n"
