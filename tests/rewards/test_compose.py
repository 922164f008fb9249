"""The default reward: ordered, bounded, masked where unknown."""

from __future__ import annotations

import dataclasses
import re
import sys
from pathlib import Path

import gymnasium
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kbx_env.rewards.compose import load_preset, load_term, presets

import kbx_env  # noqa: F401
from kbx_env.errors import UnknownName, UsageError
from kbx_env.outcome import Cases, CaseTime, Evidence, Fault, Outcome, Passing, Stage, Timing, Verdict, Violation

REWARD = load_preset("default")


def _outcome(
    verdict: Verdict, passed: int = 0, total: int = 10, low: float | None = None, launches: int = 1, **more
) -> Outcome:
    fault = None if verdict is Verdict.CORRECT else Fault.INFRA if verdict is Verdict.INFRA_FAULT else Fault.POLICY
    timing = None
    if low is not None:
        timing = Timing(
            low * 1.01, low, low * 1.02, more.pop("floor", None), (CaseTime("c", 1, 1, low, low, low, 9),), "gpu"
        )
    cases = Cases(passed, total, (), passed, total)
    return Outcome("a/b", verdict, Stage.CORRECT, "cpu", "contract", fault, cases=cases, timing=timing,
                   evidence=Evidence(launches, None), **more)  # fmt: skip


def test_the_order_of_verdicts() -> None:
    malformed = REWARD(Outcome("a/b", Verdict.MALFORMED, Stage.SCREEN, "cpu", "contract", Fault.POLICY))
    broken = REWARD(_outcome(Verdict.COMPILE_ERROR))
    rejected = REWARD(_outcome(Verdict.REJECTED, 10, violations=(Violation("r", "d"),)))
    crash = REWARD(_outcome(Verdict.RUNTIME_ERROR, 9))
    wrong = REWARD(_outcome(Verdict.INCORRECT, 9))
    right = REWARD(_outcome(Verdict.CORRECT, 10))
    fast = REWARD(_outcome(Verdict.CORRECT, 10, low=2.0))
    assert malformed == broken == rejected == 0.0
    assert 0.0 < crash < wrong < right < fast
    assert right == pytest.approx(1.0) and fast == pytest.approx(2.0)


def test_a_source_without_kernels_does_not_compile() -> None:
    idle = _outcome(Verdict.RUNTIME_ERROR, launches=0)
    assert REWARD.terms(idle)["compiles"] == 0.0 and REWARD(idle) == 0.0


def test_cases_that_nothing_could_fail_pay_nothing() -> None:
    idle = Outcome("a/b", Verdict.INCORRECT, Stage.CORRECT, "cpu", "contract", Fault.POLICY, evidence=Evidence(1, None),
                   cases=Cases(3, 10, (), 0, 7))  # fmt: skip
    assert REWARD.terms(idle)["cases"] == 0.0


def test_an_infrastructure_fault_is_masked() -> None:
    lost = _outcome(Verdict.INFRA_FAULT)
    assert REWARD(lost) is None
    assert set(REWARD.terms(lost).values()) == {None}


def test_inside_the_noise_speed_pays_nothing_and_the_floor_caps() -> None:
    assert REWARD.terms(_outcome(Verdict.CORRECT, 10, low=0.99))["speed"] == 0.0
    assert REWARD.terms(_outcome(Verdict.CORRECT, 10))["speed"] is None
    assert REWARD.terms(_outcome(Verdict.CORRECT, 10, low=64.0))["speed"] == 4.0
    assert REWARD.terms(_outcome(Verdict.CORRECT, 10, low=8.0, floor=2.0))["speed"] == 1.0


def test_the_interval_must_leave_1_behind_and_void_times_are_masked() -> None:
    def timed(low: float, **case: bool) -> Outcome:
        timing = Timing(low * 1.3, low, low * 1.6, None, (CaseTime("c", 1, 1, low, low, low, 9, **case),), "gpu")
        return dataclasses.replace(_outcome(Verdict.CORRECT, 10), timing=timing)

    def paid(low: float, **case: bool) -> float | None:
        return REWARD.terms(timed(low, **case))["speed"]

    assert paid(1.0) == paid(0.8) == 0.0, "1 lies in the interval, though the middle is above it"
    assert (paid(1.01) or 0) > 0.0
    assert paid(4.0) == 2.0 and paid(4.0, disturbed=True) == 2.0
    assert paid(4.0, void=True) is None and REWARD(timed(4.0, void=True)) is None, "a person has to look: no reward at all"
    assert timed(4.0, void=True).masked and not timed(4.0).masked


@given(st.sampled_from(list(Verdict)), st.integers(0, 10), st.none() | st.floats(1e-3, 1e6), st.integers(0, 3))
def test_never_outside_its_range(verdict: Verdict, passed: int, low: float | None, launches: int) -> None:
    if verdict is Verdict.CORRECT:
        passed = 10
    else:
        low = None
    value = REWARD(_outcome(verdict, passed, low=low, launches=launches))
    bottom, top = REWARD.range("cuda")
    assert value is None or bottom <= value <= top + 1e-9


def test_unknown_names_are_named() -> None:
    assert "default" in presets()
    with pytest.raises(UnknownName, match="default"):
        load_preset("defalt")
    with pytest.raises(UnknownName, match="speed"):
        load_term("sped")


OWN = """
from kbx_env.rewards._term import term
from kbx_env.rewards.compose import load_preset


@term(0, 1)
def tried(outcome):
    '''1 for every submission.'''
    return 1.0


class Preset:
    WEIGHTS = {"correct": 2.0, "tried": 0.25}
    TERMS = (tried,)
    ESTIMATE = "h200"


mapping = {"WEIGHTS": {"correct": 3.0}, "SHAPING": {"sound": 0.1}}
ready = load_preset("default")
heavy = {"WEIGHTS": {"correct": float("nan")}}
negative = {"WEIGHTS": {"correct": 1.0}, "SHAPING": {"sound": -0.1}}
unknown = {"WEIGHTS": {"corect": 1.0}}
device = {"WEIGHTS": {"correct": 1.0}, "ESTIMATE": "h2000"}
nothing = 5
"""


def test_a_preset_from_outside_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found in the working directory, and by everything that takes the name of a preset."""
    (tmp_path / "own_rewards.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
    right, wrong = _outcome(Verdict.CORRECT, 10), _outcome(Verdict.INCORRECT, 5)
    preset = load_preset("python:own_rewards:Preset")
    assert preset(right) == 2.25 and preset(wrong) == 0.25 and preset.estimate == "h200"
    assert preset.name == "python:own_rewards:Preset" and preset.terms(right) == {"correct": 1.0, "tried": 1.0}
    mapping = load_preset("python:own_rewards:mapping")
    assert mapping(right) == 3.0 and mapping(wrong) == -0.1 + mapping.terms(wrong)["sound"] * 0.1
    assert load_preset("python:own_rewards:ready")(right) == 1.0

    env = gymnasium.make("kbx/Kernel-v0", task="math/softmax", backend="cpu", reward="python:own_rewards:mapping",
                         grade=lambda *a, **k: right)  # fmt: skip
    env.reset()
    assert env.step("x = 1")[1] == 3.0
    env.close()


@pytest.mark.parametrize(
    "name, said",
    [
        ("python:own_rewards", "expected python:module:attribute"), ("python:no_such:x", "No module named"),
        ("python:own_rewards:no", "has no attribute"), ("python:own_rewards:nothing", "must be a Reward, or have WEIGHTS"),
        ("python:own_rewards:heavy", "a finite number"), ("python:own_rewards:negative", "0 or more"),
        ("python:own_rewards:unknown", "unknown reward term 'corect'"), ("python:own_rewards:device", "unknown device"),
        ("defualt", "default"),
    ],
)  # fmt: skip
def test_a_preset_that_cannot_be_used(
    name: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_rewards.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(UsageError, match=re.escape(said)):
        load_preset(name)


MILESTONE = load_preset("milestone")


def _timed(low: float, compiled: float | None, verdict: Verdict = Verdict.CORRECT) -> Outcome:
    timing = Timing(low * 1.02, low, low * 1.04, None, (CaseTime("c", 1, 1, low, low, low, 9),), "gpu", compiled_speedup=compiled)
    return dataclasses.replace(_outcome(verdict, 10), timing=timing)


def test_milestones_pay_once_each() -> None:
    paid = [MILESTONE(_timed(*x)) for x in ((1.04, 3.0), (1.06, 1.0), (1.06, 1.05), (1.06, 1.08), (9.0, 9.0))]
    assert paid == pytest.approx([1.0, 2.0, 2.0, 3.0, 3.0]), "by the lower end of the interval; much faster pays no more"
    assert MILESTONE.terms(_timed(1.06, None))["milestone_compiled"] is None and MILESTONE(_timed(1.06, None)) == pytest.approx(2)
    assert MILESTONE.compiled and not REWARD.compiled and MILESTONE.range("cuda") == (0.0, 3.0)
    assert MILESTONE(_outcome(Verdict.CORRECT, 10)) == pytest.approx(1.0) == MILESTONE.range("cpu")[1]
    wrong = _outcome(Verdict.INCORRECT, 4)
    assert MILESTONE(wrong) == REWARD(wrong)
    void = _timed(9.0, 9.0)
    void = dataclasses.replace(void, timing=dataclasses.replace(void.timing, cases=(CaseTime("c", 1, 1, 1, 1, 1, 9, void=True),)))
    assert MILESTONE(void) is None and set(MILESTONE.terms(void).values()) == {None}


def test_coverage_is_what_fused_kernels_stored() -> None:
    reward = load_preset("coverage")

    def made(stored: float | None, between: int, passed: int = 5) -> Outcome:
        evidence = Evidence(3, stored_share=stored, passing=Passing(passed, 5, 1000, 1000, between, 1))
        return dataclasses.replace(_outcome(Verdict.INCORRECT, passed), evidence=evidence)

    whole, half, unfused = made(1.0, 0), made(0.5, 0), made(1.0, 500)
    assert [reward.terms(o)["coverage"] for o in (whole, half, unfused)] == [0.5, 0.25, 0.25]
    assert reward(whole) == pytest.approx(REWARD(whole) - 0.05) and reward(half) < reward(whole) < REWARD(whole)
    assert reward.terms(made(None, 0))["coverage"] is None and reward.terms(made(1.0, 0, 0))["coverage"] == 0.0
