"""An expert made of parts is one source like anybody's."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

import pytest
from triton.runtime.jit import JITFunction

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


def test_no_constant_is_named_in_do_not_specialize(tmp_path: Path) -> None:
    # Triton 3.7 ignores such a name, Triton 3.6 refuses the kernel.
    found = []
    for task in task_ids():
        path = tmp_path / f"{task.replace('/', '_')}.py"
        path.write_text(expert_source(task) or "")
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        for name, kernel in vars(module).items():
            if isinstance(kernel, JITFunction):
                kept = set(kernel.do_not_specialize or ())
                found += [(task, name, p.name) for p in kernel.params if p.is_constexpr and {p.name, p.num} & kept]
    assert not found
