"""Every promise of every contract is tested by a case, and the list beside the tasks says by which."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from kbx_env.eval import promises

from kbx_env.spec.catalog import load_task, task_ids


@pytest.mark.parametrize("name", task_ids())
def test_every_promise_has_a_case_and_is_listed(name: str) -> None:
    task = load_task(name)
    rounds = promises.gradings(task)
    found = promises.tested(task, rounds)
    assert found, f"{name}: no promise was read from the contract"
    untested = [text for text, cases in found.items() if not cases]
    assert not untested, f"{name}: no case tests {untested}"
    # One derived case of a grading is contiguous: two families that each test a promise in half of the draws may miss it together.
    rare = {text: rate for text, rate in promises.rates(task, rounds).items() if rate < 0.9}
    assert not rare, f"{name}: too few gradings test {rare}"
    listed = json.loads(promises.FILE.read_text()).get(name)
    assert listed == found, f"{name}: tasks/promises.json is out of date; run eval/promises.py --write"


def test_a_layout_counts_where_it_changes_what_a_dense_read_finds() -> None:
    # Empty tensors, and tensors with one axis longer than 1, are the same in any order of axes.
    test = promises.promises(load_task("loss/kl_div"))["input: three or more axes in any order in memory"]
    case = load_task("loss/kl_div").cases[0]
    for axes, tells in (((3, 4), True), ((0, 2), False), ((1, 1), False)):
        assert test(replace(case, axes={"B": 5, "*": axes}, layouts={"input": "order 2 1 0 steps 1 1 1 pad 0 offset 0"})) is tells


def test_only_tasks_are_listed() -> None:
    assert set(json.loads(promises.FILE.read_text())) == set(task_ids())


def test_what_the_rules_misread_still_exists() -> None:
    assert {task for task, _ in promises.MISREAD} <= set(task_ids())


def test_a_promise_without_a_case_is_missing() -> None:
    assert promises.missing({"a/b": {"empty": [], "out=": ["case 0"]}}) == [("a/b", "empty")]
