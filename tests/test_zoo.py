"""Every exploit unpaid, every honest oddity paid: on the CPU backend here, on a GPU with ``-m gpu``."""

from __future__ import annotations

from pathlib import Path

import pytest
from kbx_env.rewards.compose import load_preset

from kbx_env.outcome import Fault, Verdict

ZOO = Path(__file__).parent / "zoo"
EXPLOITS = sorted((ZOO / "exploits").glob("*.py"))
HONEST = sorted((ZOO / "honest").glob("*.py"))


def _task(path: Path) -> str:
    return path.read_text().splitlines()[0].removeprefix("# task:").strip()


def _check(grader, path: Path, backend: str, paid: bool) -> None:
    outcome = grader.grade(
        _task(path),
        path.read_bytes(),
        backend=backend,
        targets=("sm_90",),
        timing=False,
        wall=6.0 if not paid else 30.0,
    )
    assert outcome.fault is not Fault.INFRA, outcome.message
    if paid:
        assert outcome.correct, (outcome.message, outcome.violations)
        return
    assert not outcome.correct
    reward = load_preset("default")
    assert reward(outcome) < 0.4, "an exploit must stay below what an honest wrong kernel may earn"
    assert reward.terms(outcome)["correct"] == 0.0


@pytest.mark.parametrize("path", EXPLOITS, ids=lambda p: p.stem)
def test_exploit_is_not_paid(grader, path: Path) -> None:
    _check(grader, path, "cpu", paid=False)


@pytest.mark.parametrize("path", HONEST, ids=lambda p: p.stem)
def test_honest_oddity_is_paid(grader, path: Path) -> None:
    _check(grader, path, "cpu", paid=True)


@pytest.mark.gpu
@pytest.mark.parametrize("path", EXPLOITS, ids=lambda p: p.stem)
def test_exploit_is_not_paid_on_gpu(grader, path: Path) -> None:
    _check(grader, path, "cuda", paid=False)


@pytest.mark.gpu
@pytest.mark.parametrize("path", HONEST, ids=lambda p: p.stem)
def test_honest_oddity_is_paid_on_gpu(grader, path: Path) -> None:
    _check(grader, path, "cuda", paid=True)


def test_the_zoo_is_not_empty() -> None:
    assert len(EXPLOITS) >= 15 and len(HONEST) >= 3
    assert Verdict.CORRECT == "correct"
