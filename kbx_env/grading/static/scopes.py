"""Which scope every name of a source is read in, by the compiler's own symbol tables.

``symtable`` runs the scope analysis of CPython's compiler and executes nothing, but its tables do not say which syntax
nodes they belong to. Here the tree is walked, and the table of a scope is found by the scope's name and line.
"""

from __future__ import annotations

import ast
import symtable
from collections.abc import Iterator, Mapping

from kbx_env.grading.static.syntax_tree import ParsedSource

ScopeKey = tuple[str, int]
"""Name and first line of a scope. Two lambdas of one line have the same key."""
FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef
_TABLE_NAMES: dict[type[ast.AST], str] = {
    ast.FunctionDef: "", ast.AsyncFunctionDef: "", ast.ClassDef: "", ast.Lambda: "lambda", ast.ListComp: "listcomp",
    ast.SetComp: "setcomp", ast.DictComp: "dictcomp", ast.GeneratorExp: "genexpr",
}  # fmt: skip
"""Nodes that open a scope, and the name of its table; empty where that is the node's own name."""


def inner_tables(table: symtable.SymbolTable) -> Iterator[symtable.SymbolTable]:
    """Yield the tables of all scopes inside a table's scope, at any depth."""
    waiting = list(table.get_children())
    while waiting:
        child = waiting.pop()
        yield child
        waiting += child.get_children()


def key_of(table: symtable.SymbolTable) -> ScopeKey:
    """Return the key of a table's scope."""
    return table.get_name(), table.get_lineno()


def names_read(source: ParsedSource, bound: Mapping[ScopeKey, set[str]], unknown: set[str]) -> Iterator[tuple[ast.Name, set[str]]]:
    """Yield every name that is read, with the names that its innermost scope binds.

    Args:
        source: the source, parsed.
        bound: the names that each scope inside the module binds; the set of the module itself is empty.
        unknown: the set for a scope that ``bound`` lacks.

    Yields:
        The syntax node of the name, and the set of its scope.
    """
    work: list[tuple[ast.AST, set[str]]] = [(source.tree, set())]
    while work:
        node, own = work.pop()
        if isinstance(node, ast.Name):
            if isinstance(node.ctx, ast.Load):
                yield node, own
            continue
        if type(node) not in _TABLE_NAMES:
            work += [(child, own) for child in source.children[node]]
            continue
        name = _TABLE_NAMES[type(node)] or str(getattr(node, "name", ""))
        inner = bound.get((name, int(getattr(node, "lineno", 0))), unknown)
        outside = set(_evaluated_outside(node))
        work += [(child, own) for child in outside]
        work += [(child, inner) for child in _evaluated_inside(source, node) if child not in outside]


def _evaluated_outside(node: ast.AST) -> list[ast.AST]:
    """Return the parts that the scope around evaluates: decorators, defaults, annotations, bases, the first iterable."""
    if isinstance(node, ast.ClassDef):
        return [*node.decorator_list, *node.bases, *node.keywords]
    if isinstance(node, ast.Lambda):
        return [node.args]
    if isinstance(node, FunctionNode):
        return [*node.decorator_list, node.args, *([node.returns] if node.returns else [])]
    return [node.generators[0].iter]  # type: ignore[attr-defined]


def _evaluated_inside(source: ParsedSource, node: ast.AST) -> list[ast.AST]:
    inside: list[ast.AST] = []
    for child in source.children[node]:
        inside += source.children[child] if isinstance(child, ast.comprehension) else [child]
    return inside
