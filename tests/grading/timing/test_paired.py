"""The arithmetic of a speedup, on sides whose true times are known."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

import pytest
from fake_device import FakeDevice
from hypothesis import given
from hypothesis import strategies as st

from kbx_env.device.stopwatch import Stopwatch
from kbx_env.grading.timing import ratio
from kbx_env.grading.timing.contestants import BLOCK, SLOTS
from kbx_env.grading.timing.paired import pair
from kbx_env.grading.timing.precision import CLEAR_LOG_RATIO, REPORT, TRAINING
from kbx_env.grading.timing.ratio import PROCESS_US, trimmed_mean

TICK_US = 0.032
"""Resolution of an H200's event clock."""


class Model:
    """A kernel of ``us`` whose time depends on its process and on where its buffers lie; the clock ticks."""

    def __init__(self, us: float, placement: float, seed: int) -> None:
        self.us, self.placement, self.rng, self.here = us, placement, random.Random(seed), 1.0
        self.offset = self.rng.gauss(0.0, PROCESS_US / math.sqrt(2))

    def shuffle(self, seed: int, calls: bool = True) -> None:
        self.here = math.exp(self.rng.gauss(0.0, self.placement))

    def measure(self, order: Sequence[int], turns: object = None, flush: bool = True, warm: bool = True) -> list[float]:
        def call() -> float:
            return self.us * self.here * math.exp(self.rng.gauss(0, 0.01)) + self.offset

        return [round(call() / TICK_US) * TICK_US for _ in order]

    def launch_us(self) -> float | None:
        return None


class Launches(Model):
    """The same, and an empty kernel tells by how much the process is slower than others, within ``LEVELLED_US``."""

    asked = 0

    def launch_us(self) -> float | None:
        self.asked += 1
        return 3.4 + self.offset + self.rng.gauss(0.0, ratio.LEVELLED_US / math.sqrt(2))


def _holds(us: float, placement: float, times: float, seed: int, kind: type[Model] = Model) -> bool:
    paired = pair(kind(us * times, placement, seed), kind(us, placement, seed + 10_000))
    return paired.low <= math.log(times) <= paired.high


@pytest.mark.parametrize("us", [2.0, 4.2, 12.0, 100.0])
@pytest.mark.parametrize("placement", [0.0, 0.002, 0.02])
def test_the_interval_holds_the_truth(us: float, placement: float) -> None:
    # Stopping when the interval is narrow costs a little of the nominal 95 %.
    assert sum(_holds(us, placement, 1.0, s) for s in range(100)) >= 88
    assert sum(_holds(us, placement, 1.3, s) for s in range(100)) >= 88


@pytest.mark.parametrize("us", [2.0, 4.2, 12.0, 100.0])
def test_the_interval_holds_the_truth_of_levelled_times_too(us: float) -> None:
    assert sum(_holds(us, 0.002, 1.0, s, Launches) for s in range(100)) >= 88


def test_processes_that_launch_at_different_speeds_are_levelled() -> None:
    """Of kernels of 4 us against themselves half were off by more than 3 %."""
    within = {
        kind: sum(abs(pair(kind(4.2, 0.002, s), kind(4.2, 0.002, s + 10_000)).log_ratio) < 0.03 for s in range(100))
        for kind in (Model, Launches)
    }
    assert within[Launches] >= 92 and within[Model] < 90


@pytest.mark.parametrize("us, asked", [(4.2, 1), (400.0, 0)])
def test_launches_are_timed_once_and_for_short_calls_only(us: float, asked: int) -> None:
    sides = Launches(us, 0.002, 1), Launches(us, 0.002, 2)
    pair(*sides)
    assert [s.asked for s in sides] == [asked] * 2


@given(st.none() | st.floats(0.5, 50.0), st.none() | st.floats(0.5, 50.0), st.floats(0.01, 100.0))
def test_levelling_favours_neither_side_and_is_bounded(
    eager_us: float | None, candidate_us: float | None, shortest_us: float
) -> None:
    shifts = ratio.levelled(eager_us, candidate_us, shortest_us)
    assert sum(shifts) == 0.0 and abs(shifts[0]) <= ratio.MAX_LAUNCH_GAP_US / 2
    assert abs(shifts[0]) < shortest_us, "no time becomes negative, whatever a runner claims"
    if eager_us is None or candidate_us is None:
        assert shifts == (0.0, 0.0), "what is not known changes nothing"
    elif eager_us != candidate_us:
        assert (shifts[0] > 0) == (eager_us > candidate_us), "who launches slowly is given the time back"


def test_a_real_difference_shows() -> None:
    paired = pair(Model(12.0, 0.01, 1), Model(11.0, 0.01, 2))
    assert paired.low > 0.03 and paired.eager_us == pytest.approx(12.0, rel=0.03)


def test_one_bad_call_in_a_block_changes_nothing() -> None:
    assert trimmed_mean([10.0, 10.1, 9.9, 10.0, 4000.0]) == pytest.approx(10.0, rel=0.01)


class Counts(Model):
    """Counts its timed calls, the untimed ones before each block, and those that a move makes."""

    calls = untimed = 0

    def shuffle(self, seed: int, calls: bool = True) -> None:
        self.untimed += SLOTS * calls
        super().shuffle(seed, calls)

    def measure(self, order: Sequence[int], turns: object = None, flush: bool = True, warm: bool = True) -> list[float]:
        self.calls, self.untimed = self.calls + len(order), self.untimed + warm
        return super().measure(order, turns, flush, warm)


def test_slow_calls_are_few() -> None:
    for us, most in ((100.0, BLOCK), (30_000.0, 1)):
        side = Counts(us, 0.0, 1)
        paired = pair(Counts(2 * us, 0.0, 2), side)
        assert side.calls <= most * paired.pairs + BLOCK
        assert paired.log_ratio == pytest.approx(math.log(2), abs=0.02)


def test_of_a_baseline_that_is_known_to_be_slow_no_call_is_wasted() -> None:
    slow = Counts(90_000.0, 0.0, 1)
    paired = pair(slow, Counts(5_000.0, 0.0, 2), about_us=90_000.0)
    assert slow.calls == paired.pairs <= 2 * REPORT.min_rounds and slow.untimed == 1
    assert paired.log_ratio == pytest.approx(math.log(18), abs=0.02)


@pytest.mark.parametrize("known", [0.0, 40_000.0])
def test_one_call_of_a_slow_baseline_is_beside_several_of_a_fast_kernel(known: float) -> None:
    """One call of 17 us is cold, and late where the host is: it would be off by any factor."""
    slow, fast = Counts(40_000.0, 0.0, 1), Counts(17.0, 0.0, 2)
    paired = pair(slow, fast, about_us=known)
    assert fast.calls >= BLOCK * (paired.pairs - 1) and slow.calls <= paired.pairs + BLOCK - 1
    assert paired.log_ratio == pytest.approx(math.log(40_000 / 17), abs=0.03)


@pytest.mark.parametrize("candidate_us", [400.0, 25.0])
def test_who_is_far_from_eager_is_measured_less_and_checked_all_the_same(candidate_us: float) -> None:
    for seed in range(20):
        checked: list[list[int]] = []
        side = Counts(candidate_us, 0.001, seed)
        paired = pair(Counts(100.0, 0.001, seed + 100), side, check=lambda order, turns: checked.append(order))
        assert REPORT.early_rounds <= paired.pairs == len(checked) < REPORT.min_rounds * REPORT.pairs
        assert paired.log_ratio == pytest.approx(math.log(100.0 / candidate_us), abs=0.02)
        assert paired.low < paired.log_ratio < paired.high
        assert max(paired.low, -paired.high) > CLEAR_LOG_RATIO


@pytest.mark.parametrize("placement", [0.002, 0.02])
def test_the_interval_holds_the_truth_of_slow_kernels_too(placement: float) -> None:
    assert sum(_holds(100.0, placement, 0.25, s) for s in range(100)) >= 88


def test_a_noisy_slow_kernel_gets_its_rounds() -> None:
    pairs = [pair(Model(100.0, 0.2, s), Model(400.0, 0.2, s + 100)).pairs for s in range(10)]
    assert sum(n >= REPORT.min_rounds * REPORT.pairs for n in pairs) >= 8


@pytest.mark.parametrize(("us", "report", "training"), [(40.0, True, True), (200.0, True, False), (600.0, False, False)])
def test_buffers_of_slow_calls_move_once(us: float, report: bool, training: bool) -> None:
    """Where a call is slow, its address changes less than the precision allows."""

    class Moves(Model):
        moves = 0

        def shuffle(self, seed: int, calls: bool = True) -> None:
            self.moves += 1

    for precision, often in ((REPORT, report), (TRAINING, training)):
        side = Moves(us, 0.0, 1)
        pair(Moves(us, 0.0, 2), side, precision=precision)
        assert (side.moves > 1) == often


def test_a_block_of_several_calls_has_been_warmed() -> None:
    class Warm(Model):
        warm = False

        def shuffle(self, seed: int, calls: bool = True) -> None:
            self.warm = calls

        def measure(self, order: Sequence[int], turns: object = None, flush: bool = True, warm: bool = True) -> list[float]:
            assert self.warm or len(order) < BLOCK
            return [self.us * self.rng.choice((0.5, 1.5)) for _ in order]

    for us in (3_000.0, 6_000.0, 12_000.0):
        pair(Warm(us, 0.0, 1), Warm(us, 0.0, 2), about_us=us)


@pytest.mark.parametrize("us", [10.0, 9_000.0, 30_000.0])
@pytest.mark.parametrize("known", [0.0, 30_000.0])
def test_every_block_may_be_looked_at_until_the_last(us: float, known: float) -> None:
    for seed in range(12):
        seen: list[tuple[list[int], object]] = []

        class Noisy(Model):
            def measure(self, order: Sequence[int], turns: object = None, flush: bool = True, warm: bool = True) -> list[float]:
                self.last = list(order)
                return [t * self.rng.choice((0.5, 1.5)) for t in super().measure(order)]

        side = Noisy(us, 0.0, seed + 50)

        def check(order: list[int], at: object, side: Noisy = side, seen: list[tuple[list[int], object]] = seen) -> None:
            seen.append((order, side.last))

        paired = pair(Model(us, 0.0, seed), side, check=check, about_us=known)
        assert len(seen) == paired.pairs and all(order == last for order, last in seen)


def test_one_interrupted_call_makes_no_other_wait() -> None:
    now, took = [0.0], iter([2e-5] * 3 + [2e-5, 4e-3, 2e-5])
    watch = Stopwatch("cpu", FakeDevice())
    watch._now = lambda: now[0]

    def call(_: dict[str, Any]) -> None:
        now[0] += next(took, 2e-5)

    watch.prepare(call, [{"n": k} for k in range(3)])
    assert watch._wait_us == pytest.approx(140.0)


@pytest.mark.parametrize("us, placement", [(30.0, 0.002), (400.0, 0.002), (30_000.0, 0.01)])
def test_for_training_fewer_rounds_are_enough(us: float, placement: float) -> None:
    for seed in range(10):
        pairs = []
        for precision in (REPORT, TRAINING):
            sides = Model(1.1 * us, placement, seed), Model(us, placement, seed + 100)
            paired = pair(*sides, precision=precision)
            pairs.append(paired.pairs)
            assert paired.log_ratio == pytest.approx(math.log(1.1), abs=3 * (paired.high - paired.low))
        assert pairs[1] < pairs[0] and TRAINING.early_rounds <= pairs[1] <= TRAINING.max_rounds
