"""Variations of a kernel mean what the kernel means."""

from __future__ import annotations

import ast
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kbx_env.train.renaming import renamed, retuned, variations

from kbx_env.spec.catalog import expert_source, load_task, load_tasks

TASKS = [t.id for t in load_tasks(split="train")]
SOURCE = '''
import torch
import triton
import triton.language as tl

LIMIT = 4  # a comment


@triton.jit
def _add(x, y, n, BLOCK: tl.constexpr):
    """Adds x and y."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < n
    tl.store(y + i, tl.load(x + i, mask=mask, other=0.0), mask=mask)


def launch(x, out=None, **options):
    """Only text."""
    config = {"BLOCK": 64}
    name = f"{x.shape}"
    _add[(triton.cdiv(x.numel(), 64),)](x, out, n=x.numel(), **config, num_warps=options.get("warps", 4))
    return out


def add(input, *, alpha=1):
    device = input.device
    out = torch.empty(input.shape, device=device)
    return launch(input, out=out, warps=LIMIT)
'''


def _same_but_for_names(one: Any, other: Any, names: dict[str, str]) -> bool:
    """Whether two trees differ by a one-to-one change of names only."""
    if type(one) is not type(other):
        return False
    if isinstance(one, ast.AST):
        pairs = [(getattr(one, f, None), getattr(other, f, None), f) for f in one._fields]
        for a, b, field in pairs:
            if field in ("id", "arg", "name") and isinstance(a, str) and isinstance(b, str):
                # A keyword that stays may be a word of another module.
                if (a != b or not isinstance(one, ast.keyword)) and names.setdefault(a, b) != b:
                    return False
            elif not _same_but_for_names(a, b, names):
                return False
        return True
    if isinstance(one, list):
        return len(one) == len(other) and all(_same_but_for_names(a, b, names) for a, b in zip(one, other))
    return bool(one == other)


def _bare(source: str) -> ast.Module:
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.FunctionDef) and ast.get_docstring(node) is not None:
            node.body = node.body[1:] if len(node.body) > 1 or isinstance(node, ast.Module) else node.body
    return tree


@settings(max_examples=25, deadline=None)
@given(task=st.sampled_from(TASKS), seed=st.integers(0, 10**9))
def test_renaming_keeps_the_meaning(task: str, seed: int) -> None:
    entry, source = load_task(task).entry, expert_source(task)
    assert source is not None
    text = renamed(source, entry, seed)
    assert text == renamed(source, entry, seed), "the same for the same seed"
    names: dict[str, str] = {}
    assert _same_but_for_names(_bare(source), _bare(text), names)
    changed = {a: b for a, b in names.items() if a != b}
    assert changed and len(set(changed.values())) == len(changed) and not set(changed.values()) & set(names)
    before, after = (
        [ast.unparse(n.args) for n in ast.parse(s).body if isinstance(n, ast.FunctionDef) and n.name == entry]
        for s in (source, text)
    )  # fmt: skip
    assert before == after and len(after) == 1 and "#" not in text


def test_what_text_keywords_and_stars_refer_to_keeps_its_name() -> None:
    texts = [renamed(SOURCE, "add", s) for s in range(20)]
    for text in texts:
        assert "def add(input, *, alpha=1):" in text and "comment" not in text and "Adds" not in text
        assert "BLOCK: tl.constexpr" in text and '{"BLOCK": 64}' in text, "a key of a configuration"
        assert "device=" in text and "mask=" in text and "num_warps=" in text and "warps=" in text, "words of other modules"
        assert "options" in text or "get(" in text
    assert any("def launch(" not in t for t in texts) and any("\nLIMIT" not in t for t in texts)
    assert any(", n=" not in t for t in texts), "a parameter of ours, and the keyword with it"


def test_numbers_change_and_stay_tunable() -> None:
    source = expert_source("activation/gelu_bf16") or ""
    found = {retuned(source, s) for s in range(10)}
    assert None not in found and len(found) > 1 and source not in found
    assert retuned("def f(x):\n    return x\n", 0) is None


def test_variations_are_different_and_named() -> None:
    task = load_task("activation/gelu_bf16")
    source = expert_source(task.id) or ""
    made = variations(source, task.entry, 6, 0)
    assert len(made) == len({s for _, s in made} | {source}) - 1 == 6
    assert {n.split("-")[0] for n, _ in made} == {"names", "knobs", "both"} and made == variations(source, task.entry, 6, 0)
    assert made != variations(source, task.entry, 6, 1)


@pytest.mark.parametrize("task", ["math/erfc_sqrt", "index/index_select", "matrixmultiply/tril_mm_and_scale", "optimizer/Lion"])
def test_renamed_kernels_are_graded_correct(grader, task: str) -> None:
    declared, source = load_task(task), expert_source(task) or ""
    for seed in (1, 2):
        outcome = grader.grade(task, renamed(source, declared.entry, seed), backend="cpu", targets=(), split="train")
        assert outcome.correct, outcome.message
