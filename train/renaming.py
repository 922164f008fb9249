"""Variations of a kernel: other names, no comments, other block sizes. The grader then checks that they are correct.

Names change module-wide by one map onto fresh names, so that scopes do not matter. A name stays wherever text, keywords or
``**`` could refer to it. The entry function and its parameters are the task's contract and never change.
"""

from __future__ import annotations

import ast
import builtins
import io
import keyword
import random
import re
import tokenize
from collections.abc import Iterator, Mapping, Sequence

from kbx_env.baselines.search.knobs import knobs_of, with_knobs
from kbx_env.baselines.search.ties import jitted

CHANGED = 3
"""Numbers of a kernel (block sizes, warps, stages) that one variation changes at most."""
SHARE = 0.75
"""Share of the names that may change that do."""
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
    """Return a source with other names and without comments and docstrings; the same for the same seed.

    Args:
        source: a Python module.
        entry: the function whose name and parameters stay.
        seed: seed of the choice of names.

    Returns:
        The source.

    Raises:
        SyntaxError: the source is no Python.
    """
    source = _bare(source)
    tree = ast.parse(source)
    names = ModuleNames(tree, entry)
    return replaced(source, occurrences(source, tree, names), _map(names, random.Random(f"{seed} names"), source))


def occurrences(source: str, tree: ast.Module, names: ModuleNames) -> list[tuple[int, int, str]]:
    """Return where names occur that may change: line (from 1), column in bytes, and name; last first.

    Args:
        source: a Python module.
        tree: its syntax tree.
        names: its names.

    Returns:
        The occurrences.
    """
    edits: list[tuple[int, int, str]] = []  # line, byte, old name
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            edits.append((node.lineno, node.col_offset, node.id))
        elif isinstance(node, ast.arg | ast.keyword) and node.arg is not None:
            if isinstance(node, ast.arg) or id(node) in names.own_keywords:
                edits.append((node.lineno, node.col_offset, node.arg))
    lines = source.splitlines(keepends=True)
    for row, column, name in _defined(source):
        edits.append((row, len(lines[row - 1][:column].encode()), name))
    return sorted(set(edits), reverse=True)


def replaced(source: str, edits: Sequence[tuple[int, int, str]], names: Mapping[str, str]) -> str:
    """Return a source with other names.

    Args:
        source: a Python module.
        edits: where names occur, as ``occurrences`` returns it.
        names: old names and their new ones; other names stay.

    Returns:
        The source.
    """
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
    """Return a source with up to ``CHANGED`` other block sizes, warps or stages.

    Args:
        source: a Python module.
        seed: seed of the choice.

    Returns:
        The source; ``None`` where it has no such number.
    """
    knobs = [k for k in knobs_of(source) if len(k.choices) > 1]
    if not knobs:
        return None
    draw = random.Random(f"{seed} knobs")
    some = draw.sample(knobs, draw.randint(1, min(CHANGED, len(knobs))))
    # At most two steps away: the kernels are tuned by hand, and sizes far from theirs mostly do not fit on the device.
    chosen = {}
    for k in some:
        at = k.choices.index(k.value)
        near = [v for v in k.choices[max(0, at - 2) : at + 3] if v != k.value]
        chosen[k.name] = draw.choice(near)
    return with_knobs(source, chosen)


def variations(source: str, entry: str, count: int, seed: int | str) -> list[tuple[str, str]]:
    """Return different variations of a source.

    Args:
        source: a Python module.
        entry: the function whose name and parameters stay.
        count: number of variations; fewer where the source has no more.
        seed: seed of the choices.

    Returns:
        Pairs of a name and a source. The name says what changed (``names``, ``knobs`` or ``both``) and the number of the draw.
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


class ModuleNames:
    """The names that a module binds, and which of them may change."""

    def __init__(self, tree: ast.Module, entry: str | None, own: frozenset[str] = frozenset()) -> None:
        """Read the names of a module.

        Args:
            tree: its syntax tree.
            entry: a function whose name and parameters stay; ``None`` for none.
            own: names that the module defines and that may change, although they are also names of builtins.
        """
        self.functions: dict[str, list[ast.FunctionDef]] = {}
        self.bound: set[str] = set()
        self.fixed: set[str] = {*(set(dir(builtins)) - own), *keyword.kwlist, *keyword.softkwlist}
        if entry is not None:
            self.fixed.add(entry)
        self.imported: set[str] = set()
        self.own_keywords: set[int] = set()
        """``id`` of each keyword node that names a parameter of a function of this module."""
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
        """Names that may change, sorted."""
        return sorted(n for n in self.bound - self.fixed - self.imported if not n.startswith("__"))

    def _look(self, node: ast.AST, entry: str | None) -> None:
        if isinstance(node, ast.arg):
            self.bound.add(node.arg)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            self.bound.add(node.id)
        elif isinstance(node, ast.FunctionDef) and node.name == entry:
            self.fixed |= set(parameters_of(node))
        elif isinstance(node, ast.Import | ast.ImportFrom):
            self.imported |= {(a.asname or a.name).split(".")[0] for a in node.names}
        elif isinstance(node, ast.Global | ast.Nonlocal):
            self.fixed |= set(node.names)
        elif isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar) and node.name:
            self.fixed.add(node.name)
        elif isinstance(node, ast.MatchMapping) and node.rest:
            self.fixed.add(node.rest)
        elif isinstance(node, ast.AsyncFunctionDef):
            self.fixed |= {node.name, *parameters_of(node)}
        elif isinstance(node, ast.ClassDef | ast.JoinedStr):
            # Names of attributes, and names whose position Python 3.11 does not report.
            self.fixed |= {n.id for n in ast.walk(node) if isinstance(n, ast.Name)} | _inner(node)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            self.fixed |= set(re.findall(r"\w+", node.value))  # keys of a configuration, names for getattr

    def _call(self, call: ast.Call) -> None:
        keywords = {k.arg for k in call.keywords if k.arg is not None}
        called = call.func.value if isinstance(call.func, ast.Subscript) else call.func
        if isinstance(called, ast.Name) and called.id in self.functions:
            for k in call.keywords:
                takers = [k.arg in parameters_of(f) for f in self.functions[called.id]]
                if all(takers):
                    self.own_keywords.add(id(k))
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
            found |= {f.name, *parameters_of(f)}
    return found


def parameters_of(f: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    """Return the names of a function's parameters."""
    a = f.args
    more = [x.arg for x in (a.vararg, a.kwarg) if x is not None]
    return [x.arg for x in (*a.posonlyargs, *a.args, *a.kwonlyargs)] + more


def _map(names: ModuleNames, draw: random.Random, source: str) -> dict[str, str]:
    """Draw new names for some of the names that may change."""
    taken = set(re.findall(r"\w+", source)) | names.fixed | names.imported
    new_names: dict[str, str] = {}
    for old in names.free:
        if draw.random() > SHARE:
            continue
        plain = old.strip("_") or "v"
        if old in names.functions:
            forms: tuple[str, ...] = _KERNELS if any(jitted(f) for f in names.functions[old]) else _FUNCTIONS
        else:
            forms = _CONSTANTS if plain.isupper() else _VALUES
        options = [*_WORDS.get(old, ()), *(form.format(plain) for form in forms), *(f"{plain}_{k}" for k in range(2, 200))]
        likely = options[: len(_WORDS.get(old, ())) or len(forms)]
        draw.shuffle(likely)
        new_names[old] = next(o for o in [*likely, *options] if o not in taken and o.isidentifier())
        taken.add(new_names[old])
    return new_names


def _defined(source: str) -> Iterator[tuple[int, int, str]]:
    """Yield line, column and name of each function definition: the syntax tree has the position of ``def`` only."""
    before = ""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.NAME and before == "def":
            yield (*token.start, token.string)
        before = token.string


def _bare(source: str) -> str:
    """Return the source without comments and docstrings, which would mention old names."""
    lines = source.splitlines(keepends=True)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            kept = lines[row - 1][:column].rstrip()
            lines[row - 1] = kept + "\n" if kept else ""
    gone: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.FunctionDef | ast.ClassDef) and ast.get_docstring(node, clean=False) is not None:
            docstring = node.body[0]
            alone = source.splitlines()[docstring.lineno - 1][: docstring.col_offset].strip() == ""
            if alone and (len(node.body) > 1 or isinstance(node, ast.Module)):
                gone |= set(range(docstring.lineno, (docstring.end_lineno or docstring.lineno) + 1))
    text = "".join(line for row, line in enumerate(lines, 1) if row not in gone)
    return re.sub(r"\n{4,}", "\n\n\n", text).strip("\n") + "\n"
