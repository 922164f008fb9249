"""Patterns of tasks: each of several must match a task, else a run would silently lack the tasks that were meant."""

from __future__ import annotations

import pytest

from kbx_env.errors import UnknownName, UsageError
from kbx_env.spec.catalog import load_tasks, matching, select_ids


def test_several_patterns_select_what_any_of_them_matches() -> None:
    assert select_ids(pattern="exp_sqrt,random/logspace") == ["math/exp_sqrt", "random/logspace"]
    assert select_ids(pattern=" exp_sqrt , math/exp*,") == select_ids(pattern="math/exp*"), "spaces and empty parts do not count"
    assert select_ids(pattern="*", category="math", split="train") == [t.id for t in load_tasks(category="math", split="train")]


@pytest.mark.parametrize("pattern", ["math/exp_sqrt,exp_sqrd", "exp_sqrd,math/exp_sqrt", "exp_sqrd", "*,exp_sqrd"])
def test_a_pattern_that_matches_nothing_is_named(pattern: str) -> None:
    says = r"task pattern 'exp_sqrd'; did you mean: math/exp_sqrt.*No task matches in split 'all'"
    with pytest.raises(UnknownName, match=says) as e:
        select_ids(pattern=pattern)
    assert e.value.got == "exp_sqrd"


def test_each_pattern_matches_within_split_and_category() -> None:
    assert select_ids(pattern="exp_sqrt,logspace", split="train")
    evaluated = select_ids(split="eval")[0]
    with pytest.raises(UnknownName, match=rf"{evaluated}'.*No task matches in split 'train'"):
        select_ids(pattern=f"exp_sqrt,{evaluated}", split="train")
    with pytest.raises(UnknownName, match="'logspace'.*split 'all' and category 'math'"):
        select_ids(pattern="exp_sqrt,logspace", category="math")
    with pytest.raises(UnknownName, match="task pattern ''"):
        select_ids(pattern="")


def test_a_category_without_a_task_of_the_split_says_where_its_tasks_are(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="it has tasks in: eval") as e:
        monkeypatch.setattr("kbx_env.spec.catalog.splits", lambda: dict.fromkeys(select_ids(), "eval"))
        select_ids(category="math", split="train")
    assert not isinstance(e.value, UnknownName)


def test_ids_keep_their_order() -> None:
    assert matching(["math/b", "math/a", "math/b"], "a,b", []) == ["math/b", "math/a", "math/b"]
