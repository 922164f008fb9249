"""Finds errors that are certain as soon as their line is reached, from a source's text alone.

A compiler stops at the first error. The grader lists these errors all at once and runs nothing: undefined names,
attributes that a module does not have, calls that fit no signature, kernels and host functions called from the wrong
side, and statements that Triton cannot translate. An error that is not certain, or that the source may catch, is left out.

Undefined names come from ``symtable``, the compiler's own scope analysis, and not from pyflakes: pyflakes follows the order
of the statements, so it reports names that an earlier pass of a loop has bound; it is recursive, so a sum of 400 terms
exhausts the stack; and on some sources it takes time quadratic in their length (25 s for 40 kB). Where pyflakes is
installed, ``tests/grading/static/test_lint.py`` compares the two: pyflakes must report every name that is reported here.
"""

from __future__ import annotations

import ast
import builtins
import functools
import inspect
import itertools
import types
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence

from kbx_env.grading.static.aliases import Names, is_module, module_at
from kbx_env.grading.static.scopes import ScopeKey, inner_tables, key_of, names_read
from kbx_env.grading.static.syntax_tree import ParsedSource
from kbx_env.outcome import LAUNCHLESS

MAX_SLIPS = 20
"""At most this many errors are returned."""
_BUILTIN = frozenset(dir(builtins)) | {"__file__", "__name__", "__doc__", "__spec__", "__loader__", "__package__", "__builtins__",
                                         "__qualname__", "__module__", "__class__", "__annotations__"}  # fmt: skip
_HIDDEN = frozenset({"_semantic", "_generator", "_builder"})
"""Parameters that Triton's compiler fills in itself."""
_JIT = frozenset({"triton.jit", "triton.runtime.jit.jit"})
_WRAPS = frozenset({
    "triton.autotune", "triton.heuristics", "triton.runtime.autotuner.autotune", "triton.runtime.autotuner.heuristics"
})  # fmt: skip
_PROBES = frozenset({"hasattr", "getattr", "dir", "find_spec", "import_module", "__version__"})
"""A source that uses one of these may ask which attributes there are before it uses them."""
# Tuples, because the checks ask for the type of every node, and a union of types is made anew each time.
_DEFS = (ast.FunctionDef, ast.AsyncFunctionDef)
_NAMED = (*_DEFS, ast.ClassDef)
_SCOPES = (*_NAMED, ast.Lambda)
_IMPORTS = (ast.Import, ast.ImportFrom)
_TRIES = (ast.Try, ast.TryStar)
_CONDITIONAL = (ast.If, ast.IfExp, ast.While)
_READ = (ast.Name, ast.Attribute, ast.ImportFrom)
_BINDING = (
    *_NAMED, ast.arg, ast.Global, ast.Nonlocal, ast.ExceptHandler, ast.MatchAs, ast.MatchStar, ast.MatchMapping
)  # fmt: skip
_MAX_LETTERS = 200
_MAX_PARAMETERS = 200
_Found = tuple[ast.AST, str]


def slips(source: ParsedSource, names: Names) -> tuple[str, ...]:
    """List the errors that are certain where they are reached.

    Args:
        source: the source, parsed.
        names: the module paths that names of the source stand for.

    Returns:
        At most ``MAX_SLIPS`` texts of the form ``line N: error``, by line, each error once with its first line. A source
        that launches no kernel has ``LAUNCHLESS`` first, without a line.
    """
    functions = _Functions(source, names)
    doubtful = _doubtful(source)
    found: dict[str, int] = {}
    for node, text in itertools.chain(_undefined(source), _missing(source, names), functions.found()):
        if id(node) not in doubtful:
            line: int = getattr(node, "lineno", 1)
            text = text[:_MAX_LETTERS]
            found[text] = min(line, found.get(text, line))
            if len(found) > 4 * MAX_SLIPS:
                break
    if functions.launchless:
        found[LAUNCHLESS] = 0
    ordered = sorted((line, text) for text, line in found.items())
    return tuple(f"line {line}: {text}" if line else text for line, text in ordered[:MAX_SLIPS])


def _doubtful(source: ParsedSource) -> set[int]:
    """Return the ids of nodes whose failure may be intended.

    These are nodes in a ``try`` with handlers or under ``contextlib.suppress``, and conditional imports: they may be
    there for another version of a library.
    """
    found = set[int]()
    waiting: list[tuple[ast.AST, bool, bool]] = [(source.tree, False, False)]
    while waiting:
        node, unsure, conditional = waiting.pop()
        if isinstance(node, _TRIES):
            unsure = unsure or bool(node.handlers)
        elif isinstance(node, ast.With):
            calls = [i.context_expr for i in node.items if isinstance(i.context_expr, ast.Call)]
            unsure = unsure or any(_last(c.func) == "suppress" for c in calls)
        elif isinstance(node, _CONDITIONAL):
            conditional = True
        if unsure or (conditional and isinstance(node, ast.ImportFrom)):
            found.add(id(node))
        waiting += [(n, unsure, conditional) for n in source.children[node]]
    return found


# --- names and attributes -----------------------------------------------------------------------------


def _undefined(source: ParsedSource) -> Iterator[_Found]:
    """Yield the names that no scope around them binds anywhere, in any order and under any condition."""
    table = source.table
    imports = [n for n in source.nodes if isinstance(n, ast.ImportFrom)]
    if any(a.name == "*" for n in imports for a in n.names):
        return
    scopes = list(inner_tables(table))
    defined = {s.get_name() for s in table.get_symbols() if s.is_assigned() or s.is_imported() or s.is_namespace()}
    defined |= {s.get_name() for t in scopes for s in t.get_symbols() if s.is_declared_global() and s.is_assigned()}
    defined |= _BUILTIN
    unbound = {s.get_name() for t in scopes for s in t.get_symbols() if s.is_referenced() and s.is_global()} - defined
    unbound |= {s.get_name() for s in table.get_symbols() if s.is_referenced()} - defined
    bound: dict[ScopeKey, set[str]] = defaultdict(set)
    for t in scopes:  # scopes that cannot be told apart bind together
        bound[key_of(t)] |= {s.get_name() for s in t.get_symbols() if s.is_free() or s.is_local()}
    if not unbound:
        return
    quiet = _unread(source)
    for node, own in names_read(source, bound, unbound):
        if node.id in unbound and node.id not in own and id(node) not in quiet:
            yield node, f"name {node.id!r} is not defined"


def _unread(source: ParsedSource) -> set[int]:
    """Return the ids of nodes in annotations that Python does not evaluate.

    With any import from ``__future__`` these are all annotations; otherwise the annotations of local variables.
    """
    nodes = source.nodes
    postponed = any(isinstance(n, ast.ImportFrom) and n.module == "__future__" for n in nodes)
    parts: list[ast.AST | None] = []
    if postponed:
        parts += [getattr(n, "annotation", None) for n in nodes] + [getattr(n, "returns", None) for n in nodes]
    else:
        waiting = [n for f in nodes if isinstance(f, _DEFS) for n in f.body]
        while waiting:
            statement = waiting.pop()
            parts.append(statement.annotation if isinstance(statement, ast.AnnAssign) else None)
            if not isinstance(statement, _NAMED):  # scopes of their own
                waiting += [n for n in source.children[statement] if isinstance(n, ast.stmt)]
                waiting += [n for h in getattr(statement, "handlers", ()) for n in h.body]
                waiting += [n for c in getattr(statement, "cases", ()) for n in c.body]
    return {id(n) for part in parts if isinstance(part, ast.AST) for n in source.below(part)}


def _missing(source: ParsedSource, names: Names) -> Iterator[_Found]:
    """Yield attributes and imports that a module does not have.

    Nothing is yielded for a source that itself asks which attributes there are, nor for attributes that it assigns.
    """
    nodes = [n for n in source.nodes if isinstance(n, _READ)]
    if any(_last(n) in _PROBES for n in nodes):
        return
    sure, quiet = _imported_only(source.nodes), _unread(source)
    made = {n.attr for n in nodes if isinstance(n, ast.Attribute) and not isinstance(n.ctx, ast.Load)}
    for node in nodes:
        if id(node) in quiet:
            continue
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load) and node.attr not in made and _root(node) in sure:
            (path, *more) = names.paths(node.value) or [""]
            if not more and _lacks(path, node.attr):
                yield node, f"module {path!r} has no attribute {node.attr!r}"
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            for alias in node.names:
                if alias.name != "*" and _lacks(node.module, alias.name):
                    yield node, f"cannot import {alias.name!r} from {node.module!r}"


@functools.lru_cache(1 << 14)
def _lacks(path: str, name: str) -> bool:
    """Whether a path leads to a module that lacks an attribute or submodule of this name."""
    parent, _, last = path.rpartition(".")
    module, package = module_at(path), module_at(parent) if parent else None
    if type(module) is not types.ModuleType or (package is not None and package.__dict__.get(last, module) is not module):
        return False  # other types have attributes of their own, and a package may have something else under its module's name
    if name in module.__dict__ or "__getattr__" in module.__dict__ or path == "__future__":
        return False
    return not is_module(f"{path}.{name}")


def _bound_by(node: ast.AST) -> list[str]:
    """Return the names that a node binds; imports are left out."""
    if isinstance(node, ast.Name):
        return [] if isinstance(node.ctx, ast.Load) else [node.id]
    if not isinstance(node, _BINDING):
        return []
    if isinstance(node, _NAMED):
        return [node.name]
    if isinstance(node, ast.arg):
        return [node.arg]
    if isinstance(node, ast.Global | ast.Nonlocal):
        return list(node.names)
    if isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar):
        return [node.name] if node.name else []
    return [node.rest] if isinstance(node, ast.MatchMapping) and node.rest else []


def _imported_by(node: ast.AST) -> list[str]:
    return [a.asname or a.name.partition(".")[0] for a in node.names] if isinstance(node, _IMPORTS) else []


def _imported_only(nodes: Sequence[ast.AST]) -> set[str]:
    """Return the names that imports bind and no other statement of the source binds, in any scope."""
    return {name for n in nodes for name in _imported_by(n)} - {name for n in nodes for name in _bound_by(n)}


def _last(node: ast.AST) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def _root(node: ast.expr) -> str:
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


# --- functions ----------------------------------------------------------------------------------------


class _Functions:
    """Kernels and host functions of a source, and the errors in their calls.

    Only functions at the top level whose names nothing else binds are checked. A function with an unknown decorator is
    neither a kernel nor a host function.
    """

    def __init__(self, source: ParsedSource, names: Names) -> None:
        nodes = source.nodes
        self._source, self._names, self._sure = source, names, _imported_only(nodes)
        every = [n for n in nodes if isinstance(n, ast.FunctionDef)]
        defined = [n for n in source.tree.body if isinstance(n, ast.FunctionDef)]
        bound = Counter(name for n in nodes for name in (*_bound_by(n), *_imported_by(n)))
        self._own = {d.name: d for d in defined if bound[d.name] == 1}
        self._kernels = {n.name for n in defined if self._is_kernel(n)}
        decorators = {id(d) for n in defined for d in n.decorator_list}
        jit_called = any(id(n) not in decorators and self._is_jit(n) for n in nodes)
        self._host = set() if jit_called else {n.name for n in defined if not n.decorator_list}
        kernels = [n for n in every if self._is_kernel(n)]  # also in factories and classes
        inside = {id(x) for n in kernels for x in source.below(n)}
        named = {_last(x) for x in nodes if id(x) not in inside}
        known = len(kernels) == sum(1 for n in every if n.decorator_list)
        self.launchless = known and not jit_called and not named & {n.name for n in kernels}
        """Whether no code outside kernels mentions a kernel's name."""
        self._signatures = {n: _signature_of(self._own[n]) for n in self._own if n in self._kernels | self._host}

    def _is_jit(self, node: ast.AST) -> bool:
        may = isinstance(node, ast.Name | ast.Call) or (isinstance(node, ast.Attribute) and node.attr == "jit")
        return may and bool(self._names.paths(node) & _JIT)  # type: ignore[arg-type]

    def _is_kernel(self, node: ast.FunctionDef) -> bool:
        paths = [self._names.paths(d.func if isinstance(d, ast.Call) else d) for d in node.decorator_list]
        return any(p & _JIT for p in paths) and all(p & (_JIT | _WRAPS) for p in paths)

    def found(self) -> Iterator[_Found]:
        """Yield the nodes of these functions that are certain to fail, each with the error."""
        for name, node in self._own.items():
            if name not in self._kernels | self._host:
                continue
            for inner in _within(self._source, node):
                if name in self._kernels and (text := _untranslated(inner)) is not None:
                    yield inner, text
                if isinstance(inner, ast.Call) and (text := self._call(inner, name in self._kernels)) is not None:
                    yield inner, text

    def _call(self, call: ast.Call, kernel: bool) -> str | None:
        func = call.func
        if isinstance(func, ast.Subscript) and isinstance(func.value, ast.Name):
            name = func.value.id
            if kernel or name not in self._own:
                return None
            if name in self._host:
                return f"{name}[...](...) launches a function that is no kernel; it lacks @triton.jit"
            plain = name in self._kernels and len(self._own[name].decorator_list) == 1
            return _unbound(name, call, self._signatures[name], launch=True) if plain else None
        if isinstance(func, ast.Name) and func.id in self._own:
            name = func.id
            if not kernel and name in self._kernels:
                return f"{name} is a kernel and called without a grid: {name}[grid](...)"
            if kernel and name in self._host:
                return f"{name} is called in a kernel and lacks @triton.jit"
            # Calls between kernels are not checked: a branch on a constexpr may be for another number of operands.
            return None if kernel or name not in self._host else _unbound(name, call, self._signatures[name])
        if _root(func) not in self._sure or len(paths := self._names.paths(func)) != 1:
            return None
        (path,) = paths
        if _triton(path) is None:
            return None
        if not kernel:
            return f"{_dotted(func)} works in kernels alone and is called in a host function"
        return _unbound(_dotted(func), call, _signature(path))


def _untranslated(node: ast.AST) -> str | None:
    """Return why Triton's code generator fails at a node, or ``None``."""
    from triton.compiler.code_generator import CodeGenerator

    if isinstance(node, ast.Compare) and len(node.ops) > 1:
        return "several comparisons in one (a < b < c) are not supported in kernels"
    if isinstance(node, ast.stmt) and not hasattr(CodeGenerator, f"visit_{type(node).__name__}"):
        return f"{type(node).__name__.lower()} is not supported in kernels"
    return None


def _dotted(node: ast.expr) -> str:
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([_last(node), *reversed(parts)])


def _within(source: ParsedSource, node: ast.FunctionDef) -> Iterator[ast.AST]:
    """Yield the nodes of a function's own body, without the bodies of functions and classes that are defined in it."""
    waiting: list[ast.AST] = list(node.body)
    while waiting:
        inner = waiting.pop()
        yield inner
        if not isinstance(inner, _SCOPES):
            waiting += source.children[inner]


@functools.lru_cache(1 << 12)
def _triton(path: str) -> Callable[..., object] | None:
    """Return the function at a path if it belongs to Triton's language and only kernels can call it, else ``None``."""
    module, _, name = path.rpartition(".")
    if not path.startswith("triton.language.") or (found := module_at(module)) is None:
        return None
    value = found.__dict__.get(name)
    if getattr(value, "__triton_builtin__", False) is True or type(value).__name__ == "JITFunction":
        return value  # type: ignore[no-any-return]
    return None


@functools.lru_cache(1 << 12)
def _signature(path: str) -> inspect.Signature | None:
    """Return the signature of such a function without the parameters that the compiler fills in; ``None`` if unknown."""
    value = _triton(path)
    try:
        signature = inspect.signature(getattr(value, "fn", value))  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return None
    return signature.replace(parameters=[p for p in signature.parameters.values() if p.name not in _HIDDEN])


def _signature_of(node: ast.FunctionDef) -> inspect.Signature | None:
    """Return the signature that ``inspect.signature`` would give, with ``None`` for all defaults.

    Args:
        node: the function.

    Returns:
        The signature; ``None`` for a function with more than ``_MAX_PARAMETERS`` parameters: to check all its calls would take time
        quadratic in the length of the source.
    """
    a, kinds = node.args, inspect.Parameter
    positional = [*((p, kinds.POSITIONAL_ONLY) for p in a.posonlyargs), *((p, kinds.POSITIONAL_OR_KEYWORD) for p in a.args)]
    if len(positional) + len(a.kwonlyargs) > _MAX_PARAMETERS:
        return None
    first = len(positional) - len(a.defaults)
    parameters = [kinds(p.arg, kind, default=kinds.empty if n < first else None) for n, (p, kind) in enumerate(positional)]
    if a.vararg:
        parameters.append(kinds(a.vararg.arg, kinds.VAR_POSITIONAL))
    for p, default in zip(a.kwonlyargs, a.kw_defaults, strict=True):
        parameters.append(kinds(p.arg, kinds.KEYWORD_ONLY, default=kinds.empty if default is None else None))
    if a.kwarg:
        parameters.append(kinds(a.kwarg.arg, kinds.VAR_KEYWORD))
    return inspect.Signature(parameters)


def _unbound(name: str, call: ast.Call, signature: inspect.Signature | None, launch: bool = False) -> str | None:
    """Return why a call does not fit a signature, or ``None`` where it fits or where that is not certain."""
    if signature is None or any(isinstance(a, ast.Starred) for a in call.args) or any(k.arg is None for k in call.keywords):
        return None
    given = {k.arg: None for k in call.keywords if k.arg is not None}
    if launch:  # num_warps and the like go to the launcher
        given = {k: v for k, v in given.items() if k in signature.parameters}
    try:
        signature.bind(*[None] * len(call.args), **given)
    except TypeError as e:
        return f"{name}(...): {e}"
    return None
