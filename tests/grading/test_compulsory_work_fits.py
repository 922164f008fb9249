"""What a case costs at least, and which cases fit a card."""

from __future__ import annotations

import pytest

from kbx_env.grading import compulsory_work
from kbx_env.spec.catalog import load_task, task_ids
from kbx_env.spec.task import Case

GB = 10**9


@pytest.mark.parametrize("name", task_ids())
def test_every_task_can_be_timed_on_24_gb_and_in_full_on_80(name: str) -> None:
    task = load_task(name)
    small = compulsory_work.fitting(task, 24 * GB)
    assert len(small) >= 2 and all(compulsory_work.BUFFERS * compulsory_work.input_bytes(task, c) <= 24 * GB for c in small)
    assert compulsory_work.fitting(task, 80 * GB) == task.timed


def test_where_nothing_fits_the_smallest_is_timed() -> None:
    task = load_task("math/cos")
    assert compulsory_work.fitting(task, 1) == task.timed[:1]
    assert compulsory_work.fitting(task, 1, task.timed[1:]) == task.timed[1:2], "or of the cases given"


@pytest.mark.parametrize("name", task_ids())
def test_operations_and_bytes_of_every_timed_case_can_be_told(name: str) -> None:
    task = load_task(name)
    for case in task.timed:
        assert compulsory_work.flops(task, case) >= 0


def test_a_nameless_group_of_axes_takes_no_axis_name_away() -> None:
    task = load_task("linearalgebra/eig")
    for order in (("*", "n"), ("n", "*")):
        case = Case({a: {"*": (7, 2), "n": 5}[a] for a in order})
        assert compulsory_work.names(task, case)["n"] == 5
    assert compulsory_work.names(task, Case({"*": (7, 2)}))["n"] == 14
    task = load_task("math/bitwise_and_binomial")
    assert [compulsory_work.operations(task, c) for c in task.timed] == [20 << k for k in (22, 24, 26)]
