"""No derived case asks for more axes than the contract allows: an honest kernel may rely on what it says."""

from __future__ import annotations

import re

import pytest

from kbx_env.grading import derived_cases
from kbx_env.spec.catalog import load_task, load_tasks
from kbx_env.spec.task import shape_of

BOUND = re.compile(r"\brank \d to (\d)\b")
BOUNDED = [t.id for t in load_tasks() if BOUND.search(" ".join(t.spec.split()))]


def test_there_are_such_contracts() -> None:
    assert len(BOUNDED) >= 4


@pytest.mark.parametrize("name", BOUNDED)
def test_derived_cases_keep_to_the_ranks_of_the_contract(name: str) -> None:
    task = load_task(name)
    most = max(int(n) for n in BOUND.findall(" ".join(task.spec.split())))
    for seed in range(30):
        for case in derived_cases.derive(task, bytes([seed]) * 32, "eval"):
            for tensor, taken in task.takes.items():
                if tensor not in case.args:
                    assert len(shape_of(taken, case.axes)) <= most, (tensor, case.label())
