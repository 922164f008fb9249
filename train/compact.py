"""A kernel's source as briefly as Python says it: no comments, one way to break lines, nothing that nobody calls.

The entry function comes first: its name has just been read, and no other function stands between. Whether a small model learns to
copy it sooner for that is not shown yet.
"""

from __future__ import annotations

import ast


def compact(source: str, entry: str) -> str:
    """The same module without comments, docstrings, unused functions and imports, its entry first, as ``ast.unparse`` writes it.

    Args:
        source: Python.
        entry: the function that is called from outside.

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
    places = [i for i, node in enumerate(tree.body) if isinstance(node, ast.FunctionDef)]
    first = next((node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == entry), None)
    if first is not None:
        tree.body.remove(first)
        tree.body.insert(places[0], first)
    return ast.unparse(tree) + "\n"


def _needed(node: ast.stmt, tree: ast.Module, entry: str) -> bool:
    if isinstance(node, ast.FunctionDef):
        return node.name == entry or node.name in _named(tree, node)
    if isinstance(node, ast.Import | ast.ImportFrom) and getattr(node, "module", None) != "__future__":
        named = _named(tree, node)
        node.names = [a for a in node.names if (a.asname or a.name.split(".")[0]) in named]
        return bool(node.names)
    return True


def _named(tree: ast.Module, but: ast.stmt) -> set[str]:
    """Names that the rest of a module reads, and the words of its texts, by which something may be looked up."""
    found: set[str] = set()
    for statement in tree.body:
        if statement is not but:
            for node in ast.walk(statement):
                if isinstance(node, ast.Name):
                    found.add(node.id)
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found.add(node.value)
    return found
