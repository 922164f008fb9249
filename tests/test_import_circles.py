"""No two modules import each other, not even for annotations."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MAPPED = ("rewards", "baselines", "train", "eval")
"""Folders of the repository that are packages below ``kbx_env`` once installed."""


def _module_level(node: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    """Yield the imports of a module outside functions; those under ``if TYPE_CHECKING`` count."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child
        elif not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from _module_level(child)


def _name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = ("kbx_env", *parts) if parts[0] in MAPPED else parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _graph(paths: Mapping[str, Path]) -> dict[str, set[str]]:
    """Return, for each module, the modules that it names in an import; its parent packages are not counted."""
    graph: dict[str, set[str]] = {}
    for name, path in paths.items():
        package = name if path.name == "__init__.py" else name.rpartition(".")[0]
        found = graph[name] = set()
        for node in _module_level(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {a.name for a in node.names}
                continue
            up = package.split(".")[: len(package.split(".")) + 1 - node.level] if node.level else []
            base = ".".join([*up, *([node.module] if node.module else [])])
            # A name may be a module of the package or something that the package's own file defines.
            found |= {f"{base}.{a.name}" if f"{base}.{a.name}" in paths else base for a in node.names}
        found &= paths.keys() - {name}
    return graph


def _circles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """Return the groups of modules that reach each other (Tarjan's strongly connected components of two or more)."""
    number: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    circles: list[list[str]] = []

    def visit(v: str) -> None:
        number[v] = low[v] = len(number)
        stack.append(v)
        for w in sorted(graph[v]):
            if w not in number:
                visit(w)
            if w in stack:
                low[v] = min(low[v], low[w])
        if low[v] == number[v]:
            at = stack.index(v)
            group, stack[at:] = stack[at:], []
            if len(group) > 1:
                circles.append(sorted(group))

    for v in sorted(graph):
        if v not in number:
            visit(v)
    return circles


def test_no_two_modules_import_each_other() -> None:
    """``kbx_env/__init__.py`` is left out: it hands on names of the whole package, and modules read its version."""
    paths = {
        _name(p): p
        for folder in ("kbx_env", *MAPPED)
        for p in sorted((ROOT / folder).rglob("*.py"))
        if "experts" not in p.parts
    }
    del paths["kbx_env"]
    assert len(paths) > 250
    assert _circles(_graph(paths)) == []


def test_circles_are_found() -> None:
    assert _circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}) == [["b", "c"]]
    guarded = "if TYPE_CHECKING:\n    import b\ntry:\n    from c import d\nfinally:\n    pass\n"
    source = ast.parse(f"import a\n{guarded}def f():\n    import e\n")
    assert [ast.unparse(n) for n in _module_level(source)] == ["import a", "import b", "from c import d"]
