"""How far a wrong kernel of a fused operation comes: steps whose values it computes are seen, whatever becomes of them."""

from __future__ import annotations

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kbx_env.rewards.compose import load_preset

from kbx_env.backends.ttir.search import Search
from kbx_env.catalog import expert_source, load_task, load_tasks
from kbx_env.grading import inputs, steps
from kbx_env.outcome import Outcome, Verdict

LOG_TANH, MV = "fusion/fused_log_tanh", "fusion/fused_mv_sigmoid_sub"
FORMULA = {LOG_TANH: "return (x - 1.0) * (x + 1.0) / (x * x + 1.0)", MV: "return tl.sigmoid(acc) - (s * e + t)"}
REWARD, DEFAULT = load_preset("fusion"), load_preset("default")


def _with(grader, task: str, line: str) -> Outcome:
    text = expert_source(task) or ""
    assert text.count(FORMULA[task]) == 1
    outcome = grader.grade(task, text.replace(FORMULA[task], line), backend="cpu", targets=())
    assert Outcome.from_dict(outcome.to_dict()) == outcome
    return outcome


WRONG = {
    "no step": (LOG_TANH, "return x * 0.37", 0.0, 0.0),
    "a constant": (LOG_TANH, "return x * 0.0 + 0.25", 0.0, 0.0),
    "the first of two": (LOG_TANH, "return tl.log(x)", 0.5, 0.5),
    "all, and something behind them": (LOG_TANH, "return (x - 1.0) * (x + 1.0) / (x * x + 1.0) + tl.log(x)", 1.0, 1.0),
    "the product alone": (MV, "return acc", 0.2, 0.45),
    "a wrong sign at the end": (MV, "return tl.sigmoid(acc) + (s * e + t)", 0.6, 0.8),
}


@pytest.mark.parametrize("name", WRONG)
def test_steps_that_are_computed_are_seen(grader, name: str) -> None:
    task, line, low, high = WRONG[name]
    outcome = _with(grader, task, line)
    assert outcome.verdict is Verdict.INCORRECT and low <= outcome.evidence.stages[steps.OPERATORS] <= high
    hint = REWARD(outcome) - DEFAULT(outcome)
    assert (hint > 0.01) == (low > 0) and REWARD(outcome) < 0.6


def test_what_is_right_needs_no_steps_and_other_tasks_have_none(grader) -> None:
    right = grader.grade(MV, expert_source(MV), backend="cpu", targets=())
    assert right.correct and right.evidence.stages is None and REWARD(right) == DEFAULT(right)
    text = (expert_source("math/erfc_sqrt") or "").replace("tl.sqrt", "tl.exp")
    other = grader.grade("math/erfc_sqrt", text, backend="cpu", targets=())
    assert other.verdict is Verdict.INCORRECT and other.evidence.stages is None and REWARD(other) == DEFAULT(other)


@pytest.mark.parametrize("task", [t.id for t in load_tasks(split="all", category="fusion") if steps.asked(t)])
def test_numbers_are_those_of_the_steps_alone(task: str) -> None:
    declared, some = load_task(task), 0
    for index, case in enumerate(declared.cases):
        args = inputs.draw(declared, case, inputs.case_seed(b"secret", task, "train", index, 0))
        found = steps.numbers(declared, case, args, random.Random(0))
        assert index != 4 or found == steps.numbers(declared, case, args, random.Random(0))
        some += len(found)
        flat = [v.double().flatten() for v in args.values() if isinstance(v, torch.Tensor) and v.is_floating_point()]
        given_ = set(torch.cat([torch.zeros(1).double(), *flat]).tolist())
        everything = [v for values, _ in found for v in values]
        assert not given_ & set(everything) and len(set(everything)) == len(everything)
        assert all(v != round(v) for v in everything) and all(s > 0 for _, slack in found for s in slack)
    assert some


def _looked(values: list[float], computed: list[float], slack: float, elem: str = "f32", name: str = "arith.addf") -> list[float]:
    search = Search([np.array(values)], [np.full(len(values), slack)])
    op = SimpleNamespace(name=name, results=[0], rtypes=[SimpleNamespace(elem=elem)])
    search.after(None, op, [np.array(computed, np.float32 if elem == "f32" else np.float64)], {})  # type: ignore[arg-type]
    return search.shares()


@given(st.lists(st.floats(-100, 100, width=32), min_size=1, max_size=40), st.data())
@settings(max_examples=100, deadline=None)
def test_a_number_is_found_where_it_is_near_and_nowhere_else(computed: list[float], draw: st.DataObject) -> None:
    at = draw.draw(st.sampled_from(computed))
    assert _looked([at + 0.0009, at - 0.0009], computed, 0.001) == [1.0]
    far = max(computed) + 1.0
    assert _looked([at, far], computed, 0.001) == [0.5] and _looked([far], computed, 0.001) == [0.0]
    assert _looked([at], [*computed, float("nan"), float("inf")], 0.001) == [1.0]


def test_what_is_no_value_of_its_own_is_passed_over() -> None:
    assert _looked([1.5], [1.5], 0.1, name="tt.load") == _looked([1.5], [1.5], 0.1, name="arith.constant") == [0.0]
    assert _looked([1.5], [1.5], 0.1, elem="f16") == [0.0] and _looked([1.5], [1.5], 0.1, elem="f64") == [1.0]
    assert _looked([1.5], [float("nan")], 0.1) == [0.0]
    search = Search([np.array([1.5])], [np.array([0.1])], left=3)
    op = SimpleNamespace(name="math.exp", results=[0], rtypes=[SimpleNamespace(elem="f32")])
    search.after(None, op, [np.full((2, 2), 1.5, np.float32)], {})  # type: ignore[arg-type]
    assert search.shares() == [0.0], "more than may be looked through"
