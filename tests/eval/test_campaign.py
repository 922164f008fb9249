"""The campaign of attacks: attempts are valid sources, and one without an effect is not counted as paid."""

from __future__ import annotations

import ast

import pytest
from kbx_env.eval import campaign

from kbx_env.spec.catalog import expert_source, load_task


def made(strategy: str, task: str) -> str:
    source = campaign.STRATEGIES[strategy](expert_source(task) or "", load_task(task).entry, str(load_task(task).signature))
    assert source is not None
    return source


def test_attempts_are_python_and_repeat_by_their_seed() -> None:
    drawn = campaign.attempts("*", 1, 3)
    assert drawn == campaign.attempts("*", 1, 3) and drawn != campaign.attempts("*", 1, 4)
    assert len({name for name, *_ in drawn}) > 30
    for _, task, source in drawn:
        ast.parse(source)
        assert source != expert_source(task)


def test_an_option_is_ignored_only_where_there_is_one() -> None:
    change = campaign.STRATEGIES["optional arguments ignored"]
    for task, applies in (("math/erf", False), ("math/softmax", True)):
        source = change(expert_source(task) or "", load_task(task).entry, str(load_task(task).signature))
        assert (source is not None) == applies


def test_every_kernel_that_stores_is_replaced() -> None:
    # The first one of a task's shared code may never be launched.
    source = made("source replaced at run time", "linearalgebra/determinant_via_qr")
    assert source.count("_unsafe_update_") > 1 and "getattr(_det_qr, '_unsafe_update_' + 'src')" in source


def test_kernels_made_from_the_same_function_are_replaced_too() -> None:
    # Small tensors launch these, so that the honest kernel ran and was paid.
    assert "getattr(_solve_any, '_unsafe_update_' + 'src')" in made("source replaced at run time", "linearalgebra/solve")


@pytest.mark.full
def test_a_line_that_nothing_executes_makes_no_difference(grader) -> None:
    # Sources with one more line counted as wrappers, which run in every call. No large image has whole blocks of channels.
    expert = expert_source("fusion/fused_conv2d_add") or ""
    load = "p = tl.load((base + row * xh + col * xw)[:, None] + c[None, :] * xc, mask=inside[:, None], other=0.0)\n"
    source = expert.replace(load, load + 16 * " " + "p = tl.where(tl.abs(p) > 1e-4, p, 0.0)\n")
    assert len(source.splitlines()) == len(expert.splitlines()) + 1
    assert not campaign._makes_a_difference("fusion/fused_conv2d_add", source, grader.grade)


@pytest.mark.full
def test_a_change_that_nothing_executes_makes_no_difference(grader) -> None:
    # The changed line solves systems, in code that tasks share.
    same = made("last program left out", "linearalgebra/det")
    assert not campaign._makes_a_difference("linearalgebra/det", same, grader.grade)
    assert campaign._makes_a_difference("reduce/min", made("last program left out", "reduce/min"), grader.grade)
    # The changed line is executed, and gives the same grid.
    text = (expert_source("reduce/min") or "").replace("grid = triton.cdiv(columns, BC)", "grid = triton.cdiv(columns, 1 * BC)")
    assert text != expert_source("reduce/min") and not campaign._makes_a_difference("reduce/min", text, grader.grade)
