"""The order of outcomes, and what it says for itself."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kbx_env.baselines.search.rank import masked, occupancy, pressure, rank

from kbx_env.errors import UsageError
from kbx_env.outcome import Build, Cases, CaseTime, Evidence, Fault, Outcome, Stage, Timing, Verdict


def build(**more: Any) -> Build:
    given: dict[str, Any] = {"kernel": "k", "target": "sm_90", "ok": True, "registers": 32, "spills": 0, "shared": 0}
    return Build(**(given | more))


def metered(sectors: int | None = 1000, moved: int | None = 1000, launches: int = 1, builds: tuple[Build, ...] = (build(),),
            **more: Any) -> Outcome:  # fmt: skip
    evidence = Evidence(launches, sector_bytes=sectors, moved_bytes=moved)
    return Outcome("t", Verdict.CORRECT, Stage.EVIDENCE, "cpu", "contract", cases=Cases(1, 1), evidence=evidence,
                   compile=builds, **more)  # fmt: skip


def timed(speedup: float, low: float, void: bool = False) -> Outcome:
    case = CaseTime("c", 1.0, 1.0, speedup, low, speedup, 10, void=void)
    timing = Timing(speedup, low, speedup, None, (case,), "gpu")
    return Outcome("t", Verdict.CORRECT, Stage.TIME, "cuda", "contract", cases=Cases(1, 1), timing=timing)


def wrong(passed: int = 0, backend: str = "cpu") -> Outcome:
    return Outcome("t", Verdict.INCORRECT, Stage.CORRECT, backend, "contract", Fault.POLICY, "c: off", Cases(passed, 4))


def fault() -> Outcome:
    return Outcome("t", Verdict.INFRA_FAULT, Stage.COMPILE, "cpu", "contract", Fault.INFRA, "no worker")


def order(*outcomes: Outcome) -> list[int]:
    return [r.index for r in rank(outcomes)]


def test_measured_time_decides_on_a_gpu() -> None:
    noisy, steady, slow = timed(2.0, 1.1), timed(1.8, 1.7), timed(0.5, 0.4)
    assert order(slow, noisy, steady) == [2, 1, 0]
    best = rank([slow, noisy, steady])[0]
    assert "1.800" in best.why and "1.700" in best.why


def test_a_time_that_nobody_believes_does_not_win() -> None:
    assert order(timed(9.0, 8.9, void=True), timed(1.0, 0.9)) == [1, 0]


def test_untimed_is_unknown_and_not_slow_beyond_a_wrong_one() -> None:
    untimed = Outcome("t", Verdict.CORRECT, Stage.EVIDENCE, "cuda", "contract", cases=Cases(1, 1))
    assert order(wrong(3, "cuda"), untimed, timed(0.1, 0.05)) == [2, 1, 0]


def test_the_order_on_the_cpu_tier() -> None:
    """Each better than the next, by the first thing in which they differ."""
    rows = [
        metered(1000, 900),
        metered(1000, 1000, 1),
        metered(1000, 1000, 2),
        metered(1000, 1000, 2, (build(spills=8),)),
        metered(1000, 1000, 2, (build(spills=16),)),
        metered(1000, 1000, 2, (build(spills=16, registers=160),)),
        metered(2000, 900),
        metered(900, 900, builds=(build(spills=16, registers=255),)),
        metered(500, 500, builds=(build(ok=False, error="needs 999999 bytes of shared memory"),)),
        wrong(3), wrong(0), fault(),
    ]  # fmt: skip
    assert order(*rows) == list(range(len(rows)))
    assert order(*reversed(rows)) == list(range(len(rows)))[::-1]


def test_it_says_why() -> None:
    text = rank([metered(1_000_000, 2_000_000, 3)])[0].why
    for part in ("1.000 MB in sectors", "2.000 MB moved", "3 launches", "no spills", "occupancy 1.00"):
        assert part in text
    unfit = metered(builds=(build(ok=False, error="needs 999999 bytes of shared memory"),))
    assert "does not run" in rank([unfit])[0].why and "999999" in rank([unfit])[0].why
    assert "no worker" in rank([fault()])[0].why


def test_missing_is_not_zero() -> None:
    unknown = metered(None, None, builds=())
    assert order(unknown, metered(10**9, 10**9)) == [1, 0]
    text = rank([unknown])[0].why
    assert "bytes in sectors not known" in text and "spills not known" in text and "occupancy not known" in text
    assert pressure([]).fits is None and pressure([build(spills=None)]).spills is None
    assert occupancy(build(registers=None, warps=4)) is None


def test_occupancy_is_that_of_the_gpu() -> None:
    # 65536 registers: 128 a thread leave 16 warps of 64; 100 KB of shared memory leave two programs of 4 warps.
    assert occupancy(build(registers=128, warps=4)) == (0.25, "registers")
    assert occupancy(build(shared=100_000, warps=4)) == (0.125, "shared memory")
    assert occupancy(build(registers=128, shared=100_000)) == (0.25, "registers; warps not known")


def test_what_lacks_a_defence_is_masked() -> None:
    bare = metered(1, 1, manifest={"without": ["firewall"]})
    assert masked(bare) and order(bare, metered()) == [1, 0]


def test_other_tasks_do_not_compare() -> None:
    with pytest.raises(UsageError, match="one task on one backend"):
        rank([metered(), timed(1.0, 1.0)])


numbers = st.none() | st.integers(1, 10**9)
good = st.builds(metered, numbers, numbers, st.integers(1, 5), st.sampled_from([(), (build(),), (build(spills=9),)]))
bad = st.builds(wrong, st.integers(0, 4)) | st.just(fault()) | st.just(metered(1, 1, manifest={"without": ["firewall"]}))


@settings(max_examples=200, deadline=None)
@given(st.lists(good | bad, max_size=8), st.randoms())
def test_correct_always_comes_first_and_the_order_given_does_not_matter(rows: list[Outcome], chance: Any) -> None:
    ranked = rank(rows)
    fine = [r.outcome.correct and not masked(r.outcome) for r in ranked]
    assert fine == sorted(fine, reverse=True) and sorted(r.index for r in ranked) == list(range(len(rows)))
    mixed = list(rows)
    chance.shuffle(mixed)
    assert [r.key for r in rank(mixed)] == [r.key for r in ranked]
    assert all(a.key <= b.key for a, b in itertools.pairwise(ranked))
