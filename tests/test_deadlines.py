"""No honest grading is lost to a deadline: each leaves room for the submission's own limit and for compilers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kbx_env.deadlines import COMPILE_SECONDS, MORE_SECONDS, WALL, deadline_of
from kbx_env.options import GradeOptions


@given(st.booleans(), st.floats(0.1, 1e4), st.booleans())
def test_a_deadline_leaves_room_for_all_that_a_grading_may_take(timed: bool, wall: float, compiled: bool) -> None:
    most = deadline_of(timed, wall, compiled)
    assert most >= 2 * wall + COMPILE_SECONDS and most >= (600 if timed else 180)
    assert most >= deadline_of(timed, wall / 2, compiled)
    assert most - deadline_of(timed, wall) == pytest.approx(MORE_SECONDS if compiled else 0)


def test_the_default_is_the_graders_own() -> None:
    assert GradeOptions().wall == WALL and deadline_of(False) == 180
