"""Times are compared with what the device can do, and eager's own time tells whether that is right."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kbx_env.grading.timing import plausibility
from kbx_env.grading.timing.case_work import CaseWork
from kbx_env.grading.timing.ratio import Paired
from kbx_env.grading.timing.roofline import BESIDE_EAGER, IMPOSSIBLE, PLAUSIBLE, Ceilings, Roofline
from kbx_env.spec.catalog import load_task

TASK = load_task("activation/relu")
FLOOR_US = 100.0
WORK = CaseWork(0, 0, round(FLOOR_US * 4e6), 0, 0)
"""Traffic that takes a device of 4 TB/s 100 us."""


def _paired(eager_us: float, candidate_us: float) -> Paired:
    ratio = math.log(eager_us / candidate_us)
    return Paired(eager_us, candidate_us, ratio, ratio, ratio, 10)


@given(st.floats(1.0, 1000.0), st.floats(1.0, 1000.0))
def test_a_time_below_the_floor_is_impossible_unless_eager_is_below_it_too(eager_us: float, candidate_us: float) -> None:
    found = plausibility.believed(TASK, WORK, Roofline(4e12, {}, 0, "a model"), _paired(eager_us, candidate_us))
    least = IMPOSSIBLE * FLOOR_US
    if abs(eager_us - least) < 1e-6 or abs(candidate_us - least) < 1e-6:
        return
    assert found.impossible == (candidate_us < least <= eager_us)
    assert (found.floor_us is None) == (eager_us < least), "eager is trusted, so the floor is wrong"
    assert (found.doubt is None) == (not found.impossible and not found.void and found.floor_us is not None)


@pytest.mark.parametrize("eager_us, candidate_us, void", [
    (200.0, FLOOR_US / PLAUSIBLE * 0.99, True), (200.0, FLOOR_US / PLAUSIBLE * 1.01, False),
    (FLOOR_US, FLOOR_US / BESIDE_EAGER * 1.01, False), (200.0, FLOOR_US * 2, False),
])  # fmt: skip
def test_a_time_near_the_floor_is_void_unless_eager_is_as_near(eager_us: float, candidate_us: float, void: bool) -> None:
    found = plausibility.believed(TASK, WORK, Roofline(4e12, {}, 0, "a model"), _paired(eager_us, candidate_us))
    assert found.void is void and not found.impossible and found.floor_us == pytest.approx(FLOOR_US)


@pytest.mark.parametrize("candidate_us, void", [(10.0, True), (90.0, False)])
def test_a_measured_copy_makes_times_void_and_none_impossible(candidate_us: float, void: bool) -> None:
    ceilings = Ceilings(copy=4e12, product=1e15, runs={}, agreed=True)
    found = plausibility.believed(TASK, WORK, Roofline(None, {}, 0, "measured", ceilings), _paired(200.0, candidate_us))
    assert (found.floor_us, found.impossible, found.void) == (None, False, void)


def test_few_calls_may_decide_a_ratio() -> None:
    even = _paired(100.0, 50.0)
    assert plausibility.skewed(even) is None and plausibility.claimed_us(even) == pytest.approx(50.0)
    delayed = Paired(100.0, 50.0, math.log(200.0 / 50.0), 0.0, 2.0, 10, eager_mean_us=200.0)
    assert "eager took 100.0 us in most calls, 200.0 in the mean" in (plausibility.skewed(delayed) or "")
    assert plausibility.claimed_us(delayed) == pytest.approx(25.0), "what the speedup amounts to"
