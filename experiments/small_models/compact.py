"""Compact sources of kernels: no comments, one way to break lines, no unused functions.

All sources begin alike: the same three imports, then the entry function, then the rest. A chat template can therefore write the
beginning of an answer (``answer=begun`` of ``build_model.py``). There are two exceptions: imports from ``__future__`` come first,
and an entry function whose definition needs names of the module (in defaults, annotations, decorators) stays where it is.
"""

from __future__ import annotations

import ast

HEAD = "import torch\nimport triton\nimport triton.language as tl\n"
"""The imports at the beginning of every source, even if it does not need all of them."""


def compact(source: str, entry: str) -> str:
    """Return a module without comments, docstrings, unused functions and imports: ``HEAD``, the entry function, the rest.

    Args:
        source: a Python module.
        entry: the name of its entry function.

    Returns:
        The source, as ``ast.unparse`` writes it.

    Raises:
        SyntaxError: the source is no Python.
    """
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            if ast.get_docstring(node, clean=False) is not None:
                node.body = node.body[1:] or ([] if isinstance(node, ast.Module) else [ast.Pass()])
    while True:
        kept = [node for node in tree.body if _needed(node, tree, entry)]
        if len(kept) == len(tree.body):
            break
        tree.body = kept
    head = ast.parse(HEAD).body
    known = {(a.name, a.asname) for node in head if isinstance(node, ast.Import) for a in node.names}
    for node in tree.body:
        if isinstance(node, ast.Import):
            node.names = [a for a in node.names if (a.name, a.asname) not in known]
    first = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == entry and not _early(node)]
    first = first if len(first) == 1 else []
    future = [node for node in tree.body if isinstance(node, ast.ImportFrom) and node.module == "__future__"]
    others = [node for node in tree.body if node not in (*first, *future)]
    rest = [node for node in others if not isinstance(node, ast.Import) or node.names]
    # The entry may come before the functions that it calls: names are looked up when it runs.
    tree.body = [*future, *head, *first, *rest]
    return ast.unparse(tree) + "\n"


def _early(node: ast.FunctionDef) -> bool:
    """Return whether the definition of a function, before any call, looks up names of the module."""
    a = node.args
    every = [*a.posonlyargs, *a.args, *a.kwonlyargs, *filter(None, (a.vararg, a.kwarg))]
    parts = [*node.decorator_list, *a.defaults, *filter(None, a.kw_defaults), *filter(None, (x.annotation for x in every))]
    names = {n.id for part in [*parts, *filter(None, [node.returns])] for n in ast.walk(part) if isinstance(n, ast.Name)}
    return bool(names - {"torch", "triton", "tl"})


def _needed(node: ast.stmt, tree: ast.Module, entry: str) -> bool:
    """Return whether a statement of the module is used; remove unused names from an import."""
    if isinstance(node, ast.FunctionDef):
        return node.name == entry or node.name in _named(tree, node)
    if isinstance(node, ast.Import | ast.ImportFrom) and getattr(node, "module", None) != "__future__":
        named = _named(tree, node)
        node.names = [a for a in node.names if (a.asname or a.name.split(".")[0]) in named]
        return bool(node.names)
    return True


def _named(tree: ast.Module, but: ast.stmt) -> set[str]:
    """Return the names that the other statements of a module use, and their texts, which may name something too."""
    found: set[str] = set()
    for statement in tree.body:
        if statement is not but:
            for node in ast.walk(statement):
                if isinstance(node, ast.Name):
                    found.add(node.id)
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found.add(node.value)
    return found
