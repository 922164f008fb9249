"""Shaped presets: right beats wrong, right ones keep their order, nothing dishonest is paid, potentials telescope."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kbx_env.rewards.compose import load_preset, presets
from kbx_env.rewards.shaping import Shaping, shaped

from kbx_env.outcome import (
    LAUNCHLESS,
    Cases,
    CaseTime,
    Evidence,
    Fault,
    Outcome,
    Passing,
    Stage,
    Timing,
    Verdict,
    Violation,
)

DEFAULT = load_preset("default")
SHAPED = [load_preset(n) for n in presets() if load_preset(n).shaping]
STAGES = ("scale", "rounding", "clamp", "packing", "product", "dequantization", "margin")
FAULTS = {Verdict.CORRECT: None, Verdict.INFRA_FAULT: Fault.INFRA}


@st.composite
def passing(draw) -> Passing:
    """Any work, also numbers that no grader would count."""
    return Passing(*(draw(st.integers(0, 10**9)) for _ in range(6)))


@st.composite
def outcomes(draw, verdicts=st.sampled_from(list(Verdict)), honest: bool | None = None) -> Outcome:
    """Any outcome that can be made, consistent or not."""
    verdict = draw(verdicts)
    right = verdict is Verdict.CORRECT
    total = draw(st.integers(1, 12))
    telling = draw(st.integers(0, total))
    passed = total if right else draw(st.integers(0, total))
    cases = Cases(passed, total, (), telling if right else min(passed, draw(st.integers(0, telling))), telling)
    broken = not right and (draw(st.booleans()) if honest is None else not honest)
    evidence = Evidence(
        draw(st.integers(0, 9)), denied_ops=("aten::mm",) if broken and draw(st.booleans()) else (),
        passing=draw(st.none() | passing()),
        stages=draw(st.none() | st.dictionaries(st.sampled_from(STAGES), st.floats(0, 1))),
    )  # fmt: skip
    timing = None
    if right and draw(st.booleans()):
        low = draw(st.floats(1e-3, 1e6))
        timing = Timing(low, low, low, draw(st.none() | st.floats(0.1, 100)), (CaseTime("c", 1, 1, low, low, low, 9),), "gpu")
    kept = right or draw(st.booleans())
    return Outcome(
        "a/b", verdict, Stage.CORRECT, draw(st.sampled_from(["cpu", "cuda"])), "contract", FAULTS.get(verdict, Fault.POLICY),
        cases=cases if kept else None, evidence=evidence if draw(st.booleans()) else None, timing=timing,
        violations=(Violation("constant", "d"),) if broken and not evidence.denied_ops else (),
        slips=draw(st.none() | st.lists(st.sampled_from([LAUNCHLESS, "line 1: a", "line 2: b"]), unique=True).map(tuple)),
    )  # fmt: skip


RIGHT = outcomes(st.just(Verdict.CORRECT))
WRONG = outcomes(st.sampled_from([v for v in Verdict if v not in (Verdict.CORRECT, Verdict.INFRA_FAULT)]))


def test_both_problems_have_a_preset() -> None:
    assert {"fusion", "quantization"} <= {r.name for r in SHAPED}


@given(WRONG, RIGHT)
def test_right_beats_wrong(wrong: Outcome, right: Outcome) -> None:
    for reward in SHAPED:
        low, high = reward(wrong), reward(right)
        assert low is not None and high is not None and low < high


@given(RIGHT, RIGHT)
def test_right_ones_are_ordered_as_by_default(a: Outcome, b: Outcome) -> None:
    for reward in SHAPED:
        assert reward(a) == DEFAULT(a) and (reward(a) < reward(b)) == (DEFAULT(a) < DEFAULT(b))


@given(WRONG)
def test_hints_only_take_away_and_stay_within_the_documented_range(wrong: Outcome) -> None:
    for reward in SHAPED:
        less = DEFAULT(wrong) - reward(wrong)
        assert -1e-12 <= less <= sum(reward.shaping.values()) + 1e-12
        low, high = reward.range("cpu")
        assert low - 1e-12 <= reward(wrong) < high


@given(WRONG)
def test_no_preset_pays_a_wrong_or_rejected_submission_more_than_default(wrong: Outcome) -> None:
    for reward in map(load_preset, presets()):
        assert reward(wrong) <= DEFAULT(wrong) + 1e-12, reward.name


def passes_some(o: Outcome) -> bool:
    """Whether a telling case passed that counts: something was launched, and no rule was broken."""
    if o.violations or o.evidence is None or o.evidence.denied_ops or not o.evidence.launches or o.cases is None:
        return False
    return o.verdict not in (Verdict.MALFORMED, Verdict.REJECTED) and bool(o.cases.telling_passed)


ORDERED = ("default", "estimated", "beginner", "fusion", "milestone", "coverage")
"""Presets under which cases that pass outweigh all hints; ``quantization`` pays stages of a wrong case as well."""


@given(outcomes(), outcomes())
def test_what_passes_cases_earns_more_than_what_passes_none(a: Outcome, b: Outcome) -> None:
    some, none = (a, b) if passes_some(a) else (b, a)
    if not passes_some(some) or passes_some(none) or none.correct or some.masked or none.masked:
        return
    for reward in map(load_preset, ORDERED):
        assert reward(some) > reward(none), reward.name


@pytest.mark.parametrize("verdict", [Verdict.COMPILE_ERROR, Verdict.RUNTIME_ERROR, Verdict.TIMEOUT])
def test_an_error_after_cases_that_passed_is_worth_less_than_a_wrong_value(verdict: Verdict) -> None:
    """A compile error after 13 of 17 cases once earned 0, and a kernel that wrote out of bounds in every case 0.1."""
    stopped = Outcome("a/b", verdict, Stage.CORRECT, "cpu", "contract", Fault.POLICY, evidence=Evidence(13),
                      cases=Cases(13, 17, (), 13, 17, 14, "case"))  # fmt: skip
    wrong = dataclasses.replace(stopped, verdict=Verdict.INCORRECT, cases=Cases(13, 17, (), 13, 17))
    at_once = dataclasses.replace(stopped, cases=Cases(0, 17, (), 0, 17, 1, "case"), evidence=Evidence(1))
    assert DEFAULT(at_once) <= 0.1 and DEFAULT(wrong) > DEFAULT(stopped) == pytest.approx(0.1 + 0.3 * 0.9 * 13 / 17)
    fewer = dataclasses.replace(wrong, cases=Cases(1, 17, (), 1, 17))
    assert DEFAULT(fewer) > 0.1
    for broken in ({"violations": (Violation("constant", "d"),)}, {"evidence": Evidence(13, denied_ops=("aten::mm",))},
                   {"evidence": Evidence(0)}):  # fmt: skip
        assert DEFAULT(dataclasses.replace(stopped, **broken)) <= 0.1, "no cheat gains by raising at the end"


@given(outcomes(honest=False))
def test_the_dishonest_lose_all_that_hints_are_worth(outcome: Outcome) -> None:
    dishonest = outcome.violations or (outcome.evidence and outcome.evidence.denied_ops)
    for reward in SHAPED if dishonest and not outcome.correct and outcome.fault is not Fault.INFRA else ():
        assert reward(outcome) == pytest.approx(DEFAULT(outcome) - sum(reward.shaping.values()))


@given(outcomes(st.sampled_from([v for v in Verdict if v not in (Verdict.CORRECT, Verdict.INCORRECT)])))
def test_who_stops_half_way_or_launches_nothing_loses_all_that_hints_are_worth(outcome: Outcome) -> None:
    """But for what can be read of a source that a compiler or an exception stopped, and that names a kernel to launch."""
    idle = dataclasses.replace(outcome, evidence=Evidence(0, passing=Passing(9, 9, 9, 9, 0, 0), stages=dict.fromkeys(STAGES, 1.0)))
    if outcome.fault is Fault.INFRA:
        return
    for reward, one in itertools.product(SHAPED, (outcome, idle)):
        least = pytest.approx(DEFAULT(one) - sum(reward.shaping.values()))
        unread = dataclasses.replace(one, slips=None)
        assert reward.name == "beginner" or reward(unread) == least
        launchless = dataclasses.replace(one, slips=(LAUNCHLESS,))
        assert reward.name == "beginner" or reward(launchless) == least
        assert reward(one) <= DEFAULT(one) - sum(reward.shaping.values()) + 0.065 + 1e-12
    assert load_preset("quantization")(outcome) == pytest.approx(DEFAULT(outcome) - 0.18)


def test_fewer_certain_errors_pay_more_until_a_kernel_compiles() -> None:
    def made(verdict: Verdict, slips: tuple[str, ...] | None, launches: int = 0, **more) -> Outcome:
        known = {"evidence": Evidence(launches), "slips": slips}
        return Outcome("a/b", verdict, Stage.CORRECT, "cpu", "contract", Fault.POLICY, **known, **more)

    for reward in map(load_preset, ("fusion", "beginner")):
        steps = [made(Verdict.COMPILE_ERROR, tuple(f"line {k}: a" for k in range(n))) for n in (20, 3, 2, 1, 0)]
        paid = [reward(o) for o in [*steps, made(Verdict.RUNTIME_ERROR, ("line 1: a",), 1), made(Verdict.INCORRECT, (), 1)]]
        assert paid == sorted(paid) and len(set(paid[:6])) == 6
        assert reward.terms(steps[-2])["sound"] == 0.5 and reward.terms(steps[-1])["sound"] == 1.0
        assert reward.terms(made(Verdict.RUNTIME_ERROR, (LAUNCHLESS,)))["sound"] == 0.0
        assert reward.terms(made(Verdict.COMPILE_ERROR, None))["sound"] is None, "graded before they were looked for"
        for verdict in (Verdict.MALFORMED, Verdict.REJECTED, Verdict.TIMEOUT, Verdict.INCORRECT):
            assert reward.terms(made(verdict, ()))["sound"] == 0.0
        assert reward.terms(made(Verdict.RUNTIME_ERROR, (), violations=(Violation("constant", "d"),)))["sound"] == 0.0


def test_a_beginner_is_paid_for_every_stage() -> None:
    reward = load_preset("beginner")

    def made(verdict: Verdict, launches: int = 0, **more) -> Outcome:
        return Outcome("a/b", verdict, Stage.CORRECT, "cpu", "contract", Fault.POLICY, evidence=Evidence(launches), **more)

    steps = [made(Verdict.MALFORMED), made(Verdict.RUNTIME_ERROR), made(Verdict.RUNTIME_ERROR, 1), made(Verdict.INCORRECT, 1)]
    paid = [reward(o) for o in steps]
    assert paid == sorted(set(paid)) and paid[0] == pytest.approx(-0.1) and paid[-1] == pytest.approx(0.05)
    assert [reward(o) - DEFAULT(o) for o in steps] == pytest.approx([-0.1, -0.085, -0.06, -0.05])
    assert reward(made(Verdict.COMPILE_ERROR)) == reward(steps[1]), "its own process says so: any name of an exception would do"
    late = dataclasses.replace(steps[-1], stage=Stage.TIME)
    assert reward(late) == pytest.approx(DEFAULT(late) - 0.1), "right until it was timed"
    assert reward(made(Verdict.TIMEOUT)) == reward(made(Verdict.INCORRECT)) == pytest.approx(-0.085), "nothing was launched"
    assert reward(made(Verdict.REJECTED, violations=(Violation("constant", "d"),))) == pytest.approx(-0.1)


@given(outcomes(st.just(Verdict.INFRA_FAULT)))
def test_faults_of_the_machine_are_masked(outcome: Outcome) -> None:
    for reward in SHAPED:
        assert reward(outcome) is None and reward.potential(outcome) is None and reward.base(outcome) is None
        assert set(reward.terms(outcome).values()) == {None}


def _wrong(passed: int, **evidence) -> Outcome:
    return Outcome("a/b", Verdict.INCORRECT, Stage.CORRECT, "cpu", "contract", Fault.POLICY,
                   cases=Cases(passed, 10, (), passed, 10), evidence=Evidence(3, **evidence))  # fmt: skip


@given(st.floats(0, 1), st.floats(0, 1), st.integers(0, 8))
def test_a_case_set_right_always_pays_more(before: float, after: float, passed: int) -> None:
    """Whatever the stages of the other cases do meanwhile, as long as they do not get worse."""
    reward = load_preset("quantization")
    low, high = sorted((before, after))
    first = reward(_wrong(passed, stages=dict.fromkeys(STAGES, low)))
    assert reward(_wrong(passed + 1, stages=dict.fromkeys(STAGES, high))) > first
    assert reward(_wrong(passed + 1, stages=dict.fromkeys(STAGES, low))) > first


def test_fusing_pays_only_where_the_values_are_right() -> None:
    reward = load_preset("fusion")
    fused, plain = Passing(5, 5, 1000, 1000, 0, 0), Passing(5, 20, 4000, 1000, 2500, 15)
    best, some, none = (reward(_wrong(n, passing=p)) for n, p in ((5, fused), (5, plain), (0, fused)))
    assert best > some > none == pytest.approx(DEFAULT(_wrong(0)) - 0.19)
    assert best == pytest.approx(DEFAULT(_wrong(5)) - 0.19 + 0.14 / 2)
    terms = reward.terms(_wrong(5, passing=plain))
    assert (terms["launches"], terms["traffic"], terms["intermediates"]) == (0.25 / 2, 0.25 / 2, 0.375 / 2)
    assert reward.terms(_wrong(5))["launches"] is None and reward(_wrong(5)) == pytest.approx(DEFAULT(_wrong(5)) - 0.19)


# -- potentials ------------------------------------------------------------------------------------
EPISODES = st.lists(st.none() | st.floats(0, 1), min_size=1, max_size=12)


@given(EPISODES, st.floats(0, 1), st.booleans())
def test_shaping_telescopes(potentials: list[float | None], gamma: float, ends: bool) -> None:
    """The discounted sum is gamma^T Phi_T - Phi_0; Phi_0 is 0, and so is Phi_T where the episode ends."""
    known = [p for p in potentials if p is not None]
    episode = Shaping(gamma)
    steps = [episode.step(p, ends and i == len(known) - 1) for i, p in enumerate(known)]
    total = sum(gamma**t * f for t, f in enumerate(steps) if f is not None)
    last = 0.0 if ends or not known else known[-1]
    assert total == pytest.approx(gamma ** len(known) * last, abs=1e-9)
    whole = [f for f in shaped(potentials, gamma) if f is not None]
    assert len(whole) == len(known) and sum(gamma**t * f for t, f in enumerate(whole)) == pytest.approx(0.0, abs=1e-9)


STEPS = st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=1, max_size=6)


@given(st.lists(STEPS, min_size=2, max_size=5), st.floats(0, 1))
def test_the_best_sequence_of_submissions_stays_the_best(episodes: list[list[tuple[float, float]]], gamma: float) -> None:
    """Each episode is rewards and potentials; shaping adds the same constant, 0, to every one of them."""
    for episode in episodes:
        plain = sum(gamma**t * r for t, (r, _) in enumerate(episode))
        steps = shaped([p for _, p in episode], gamma)
        assert sum(gamma**t * (r + f) for t, ((r, _), f) in enumerate(zip(episode, steps, strict=True))) == pytest.approx(plain)


def test_one_submission_cannot_be_shaped_by_a_potential() -> None:
    assert shaped([0.7]) == [0.0]
    assert shaped([None, 0.2, None, 0.5, None]) == [None, 0.2, None, -0.2, None]


def test_a_discount_is_no_more_than_one() -> None:
    with pytest.raises(ValueError, match="gamma"):
        Shaping(1.5)
