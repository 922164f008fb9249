"""Every promise of every contract is tested by a case, and the list beside the tasks says by which."""

from __future__ import annotations

import json

import pytest
from kbx_env.eval import promises

from kbx_env.spec.catalog import load_task, task_ids


@pytest.mark.parametrize("name", task_ids())
def test_every_promise_has_a_case_and_is_listed(name: str) -> None:
    found = promises.tested(load_task(name))
    assert found, f"{name}: no promise was read from the contract"
    untested = [text for text, cases in found.items() if not cases]
    assert not untested, f"{name}: no case tests {untested}"
    listed = json.loads(promises.FILE.read_text()).get(name)
    assert listed == found, f"{name}: tasks/promises.json is out of date; run eval/promises.py --write"


def test_only_tasks_are_listed() -> None:
    assert set(json.loads(promises.FILE.read_text())) == set(task_ids())


def test_what_the_rules_misread_still_exists() -> None:
    assert {task for task, _ in promises.MISREAD} <= set(task_ids())


def test_a_promise_without_a_case_is_missing() -> None:
    assert promises.missing({"a/b": {"empty": [], "out=": ["case 0"]}}) == [("a/b", "empty")]
