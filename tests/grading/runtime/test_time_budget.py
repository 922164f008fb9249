"""The wall time of a submission: what is charged to it, and what is not."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kbx_env.deadlines import COMPILE_SECONDS
from kbx_env.grading.runtime import time_budget
from kbx_env.grading.runtime.time_budget import TimeBudget

seconds = st.floats(0.0, 200.0)


def test_a_block_apart_costs_nothing_and_ends_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time_budget, "time", SimpleNamespace(monotonic=lambda: now[0]))
    budget = TimeBudget(30.0)
    with contextlib.suppress(ValueError), budget.apart(20.0):
        assert budget.left == 20.0
        now[0] = 5.0
        budget.restart(120.0)
        assert budget.left == 15.0, "all commands of the block have its time together"
        with budget.compiling():
            now[0] = 9.0
            budget.spend(4.0)
        assert budget.left == 11.0, "compilers have none of their own there"
        raise ValueError("an error in the block")
    assert budget.left == 30.0 and budget.compile_left == COMPILE_SECONDS
    budget.restart(120.0)
    assert budget.left == 120.0


@given(st.lists(seconds, max_size=6), seconds)
def test_compilers_pay_for_themselves_until_their_time_is_spent(compiled: list[float], called: float) -> None:
    now = [0.0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time_budget, "time", SimpleNamespace(monotonic=lambda: now[0]))
        budget = TimeBudget(30.0)
        for took in compiled:
            with budget.compiling():
                now[0] += took
                budget.spend(took)
        budget.spend(called)
    over = max(0.0, sum(compiled) - COMPILE_SECONDS)
    assert budget.left == pytest.approx(30.0 - called - over)
    assert budget.compile_spent == pytest.approx(min(sum(compiled), COMPILE_SECONDS))


def test_free_blocks_cost_nothing_and_timing_has_a_limit_of_its_own() -> None:
    budget = TimeBudget(30.0)
    budget.spend(10.0)
    with budget.free():
        budget.spend(25.0)
    assert budget.left == 20.0
    budget.grant(5.0)
    assert budget.left == 25.0
    budget.restart(60.0)
    assert budget.left == 60.0 and budget.wall == 30.0
