"""Answers of timed calls: the reference runs in the declared dtypes only where the ruling depends on it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from judge_helper import answer, draw

from kbx_env.grading import judge, reference
from kbx_env.spec.catalog import load_task, load_tasks
from kbx_env.spec.criteria import Close, Invariant
from kbx_env.spec.task import Case

LAZY = [t.id for t in load_tasks() if isinstance(t.truth, Close | Invariant)]


@pytest.fixture
def native_runs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Ids of the tasks whose references ran in the declared dtypes."""
    runs, real = list[str](), reference._native
    monkeypatch.setattr(reference, "_native", lambda task, *more: runs.append(task.id) or real(task, *more))  # type: ignore[func-returns-value]
    return runs


def _case(name: str) -> Case:
    return max((c for c in load_task(name).cases if not (c.raises or c.out) and c.elements()), key=lambda c: c.elements())


def _right(name: str, case: Case, args: dict[str, Any]) -> judge.Answer:
    """Torch's own answer, as a kernel would give it."""
    own = reference.expect(load_task(name), case, args, "cpu")
    after = {k: v for k, v in args.items() if isinstance(v, torch.Tensor)} | dict(own.native_written)
    changed = load_task(name).written(case.args)
    aliases = tuple(a if a in changed else None for a in own.aliases)
    return judge.Answer(own.native, own.is_tuple, after, aliases, aliases)


def _rulings(name: str, case: Case, args: dict[str, Any], given: judge.Answer) -> tuple[bool, bool]:
    """Whether an answer passes as that of a timed call, and as that of an ordinary one."""
    task = load_task(name)
    return judge.judge(task, case, args, [given], timed=True, lazy=True).passed, judge.judge(task, case, args, [given]).passed


@pytest.mark.parametrize("name", ["math/cos", "linearalgebra/cholesky", "reduce/sum", "matrixmultiply/matmul_bf16",
                                  "linearalgebra/eig", "linearalgebra/ldl_factor", "linearalgebra/lu"])
def test_a_right_answer_needs_no_run_of_torchs_own(name: str, native_runs: list[str]) -> None:
    case = _case(name)
    args = draw(load_task(name), case, 4)  # with 1, an element of the bf16 product cancels by chance
    given = _right(name, case, args)
    native_runs.clear()
    assert judge.judge(load_task(name), case, args, [given], timed=True, lazy=True).passed and not native_runs


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(["math/cos", "math/fftn", "linearalgebra/lu", "spatialops/grid_sample_with_affine", "loss/mse_loss"]),
       st.integers(0, 1 << 30), st.sampled_from([0.0, 1e-7, 1e-6, 1e-5, 1e-4, 1e-2]))  # fmt: skip
def test_a_timed_answer_is_ruled_on_as_any_other(name: str, seed: int, off: float) -> None:
    case = _case(name)
    args = draw(load_task(name), case, seed)
    given = _right(name, case, args)
    moved = tuple(o * (1 + off) if o.dtype.is_floating_point or o.is_complex() else o for o in given.outputs)
    timed, ordinary = _rulings(name, case, args, replace(given, outputs=moved))
    assert timed == ordinary


@pytest.mark.parametrize("name", LAZY)
def test_torchs_own_answer_passes_and_zeros_are_ruled_on_alike(name: str) -> None:
    case = _case(name)
    args = draw(load_task(name), case, 1)
    given = _right(name, case, args)
    assert _rulings(name, case, args, given) == (True, True)
    wrong = replace(given, outputs=tuple(torch.zeros_like(o) for o in given.outputs))
    timed, ordinary = _rulings(name, case, args, wrong)
    assert timed == ordinary


def test_structure_counts_before_values() -> None:
    case = _case("math/cos")
    args = draw(load_task("math/cos"), case, 1)
    given = _right("math/cos", case, args)
    for wrong in (
        replace(given, outputs=(given.outputs[0].double(),)),
        replace(given, outputs=(given.outputs[0][:-1],)),
        replace(given, is_tuple=True),
        replace(given, shares=("input_tensor",)),
        replace(given, after={"input_tensor": args["input_tensor"] + 1}),
    ):
        assert not judge.judge(load_task("math/cos"), case, args, [wrong], timed=True, lazy=True).passed


def test_a_shape_that_depends_on_values_is_ruled_on_with_torchs_own(native_runs: list[str]) -> None:
    name = "fusion/fused_masked_select_add_gelu"
    case = _case(name)
    args = draw(load_task(name), case, 1)
    assert reference.exact_answer(load_task(name), case, args, "cpu") is None and not native_runs
    assert _rulings(name, case, args, _right(name, case, args)) == (True, True)


def test_an_answer_beyond_the_declared_tolerance_is_compared_with_torchs_error(native_runs: list[str]) -> None:
    """On another device: the run there is asked for only then."""
    asked, task = list[int](), load_task("math/cos")
    case = _case("math/cos")
    args = draw(task, case, 1)
    own = reference.expect(task, case, args, "cpu")
    rough = replace(own, native=(own.native[0] * (1 + 1e-5),))

    def native() -> reference.Expected:
        asked.append(1)
        return rough

    near, right = answer(own.native[0] * (1 + 2e-5), args=args), answer(own.native[0], args=args)
    assert judge.judge(task, case, args, [right], timed=True, lazy=True, native=native).passed and not asked
    assert judge.judge(task, case, args, [near], timed=True, lazy=True, native=native).passed and asked
    assert not judge.judge(task, case, args, [near], timed=True, lazy=True).passed
