"""The kept list of telling cases is what the judge says."""

from __future__ import annotations

from dataclasses import replace

import pytest
from kbx_env.eval import telling as tool

from kbx_env.grading import telling
from kbx_env.spec.catalog import load_task, task_ids

SOME = ("activation/relu", "index/masked_select", "reduce/any", "math/div")


def test_no_entry_is_out_of_date() -> None:
    assert tool.stale() == [], "run python eval/telling.py --write"


@pytest.mark.parametrize("name", task_ids())
def test_the_list_is_what_the_judge_says(name: str) -> None:
    task = load_task(name)
    kept = [telling.is_telling(task, i) for i in range(len(task.cases))]
    assert kept == [telling.computed(task, i) for i in range(len(task.cases))] and any(kept)


def test_a_task_that_was_changed_is_asked_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    task = load_task("activation/relu")
    monkeypatch.setattr(telling, "computed", lambda task, index: "computed")
    assert telling.is_telling(replace(task, fingerprint="another"), 0) == "computed"
    assert isinstance(telling.is_telling(task, 0), bool)
