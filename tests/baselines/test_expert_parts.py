"""An expert made of parts is one source like anybody's."""

from __future__ import annotations

import ast

import pytest

from kbx_env.grading.static.screen import screen
from kbx_env.spec.catalog import PARTS, expert_source, load_task, task_ids


@pytest.mark.parametrize("name", task_ids())
def test_every_task_has_an_expert_that_passes_the_screen(name: str) -> None:
    source = expert_source(name)
    assert source is not None and PARTS not in source
    screened = screen(load_task(name), source)
    assert screened.verdict is None, screened.message
    assert screened.slips == ()
    tree = ast.parse(source)
    defined = [n.name for n in tree.body if isinstance(n, ast.FunctionDef)]
    # A part that defines what the expert defines too would replace it, or be replaced, unseen.
    assert len(defined) == len(set(defined)), [d for d in defined if defined.count(d) > 1]
    assert ast.get_docstring(tree) is None or source.startswith('"""') or "# parts" not in source
