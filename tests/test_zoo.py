"""Every exploit unpaid, every honest oddity paid: on the CPU backend here, on a GPU with ``-m gpu``."""

from __future__ import annotations

import pytest
from kbx_env.eval.zoo import Specimen, graded, paid, specimens
from kbx_env.rewards.compose import load_preset

from kbx_env.outcome import Fault

ATTACKS = specimens(honest=False)
HONEST = specimens(honest=True)
ANYWHERE = [s for s in ATTACKS if s.backend != "cuda"]


def _check(grader, s: Specimen, backend: str) -> None:
    outcome = graded(grader, s, backend)
    assert outcome.fault is not Fault.INFRA, outcome.message
    if s.honest:
        assert outcome.correct, (outcome.message, outcome.violations)
        return
    assert not paid(s, outcome)
    if outcome.correct:  # the time was told as it is
        return
    reward = load_preset("default")
    assert reward(outcome) < 0.4, "an exploit must stay below what an honest wrong kernel may earn"
    assert reward.terms(outcome)["correct"] == 0.0


@pytest.mark.parametrize("s", ANYWHERE, ids=lambda s: s.name)
def test_attack_is_not_paid(grader, s: Specimen) -> None:
    _check(grader, s, "cpu")


@pytest.mark.parametrize("s", HONEST, ids=lambda s: s.name)
def test_honest_oddity_is_paid(grader, s: Specimen) -> None:
    _check(grader, s, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("s", ATTACKS, ids=lambda s: s.name)
def test_attack_is_not_paid_on_gpu(grader, s: Specimen) -> None:
    _check(grader, s, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("s", HONEST, ids=lambda s: s.name)
def test_honest_oddity_is_paid_on_gpu(grader, s: Specimen) -> None:
    _check(grader, s, "cuda")
