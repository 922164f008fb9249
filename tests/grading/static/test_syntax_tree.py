"""The lists of nodes that all checks of the screen read."""

from __future__ import annotations

import ast
import symtable

from kbx_env.grading.static.syntax_tree import ParsedSource, walked
from kbx_env.spec.catalog import expert_source


def test_a_source_is_walked_once_in_the_order_of_the_library() -> None:
    more = "\nasync def g(a, /, *b: int, c=[x for x in y if x], **d) -> 'z': return lambda: {1: ...}\n"
    text = expert_source("math/softmax") + more
    tree = ast.parse(text)
    source = ParsedSource(tree, symtable.symtable(text, "source", "exec"), *walked(tree))
    assert source.nodes == list(ast.walk(tree))
    assert all(source.children[n] == list(ast.iter_child_nodes(n)) for n in source.nodes)
    inner = next(n for n in source.nodes if isinstance(n, ast.Lambda))
    assert sorted(map(id, source.below(inner))) == sorted(map(id, ast.walk(inner)))
