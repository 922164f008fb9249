"""Every exploit unpaid, every honest oddity paid: on the CPU backend here, on a GPU with ``-m gpu``."""

from __future__ import annotations

from pathlib import Path

import pytest
from kbx_env.eval.zoo import Specimen, graded, paid, specimens
from kbx_env.rewards.compose import load_preset

from kbx_env.grading.grader import Grader
from kbx_env.outcome import Fault

ATTACKS = specimens(honest=False)
HONEST = specimens(honest=True)
ANYWHERE = [s for s in ATTACKS if s.backend != "cuda"]
FAIR = [s for s in HONEST if s.backend != "cuda"]


def _check(grader, s: Specimen, backend: str) -> None:
    # Of all attacks this one alone waits for the limit: how long that is does not matter to it.
    outcome = graded(grader, s, backend, **({"wall": 3.0} if s.name == "hang" and backend == "cpu" else {}))
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


def _known(s: Specimen):
    marks = [pytest.mark.xfail(reason=s.open, strict=True)] if s.open else []
    return pytest.param(s, id=s.name, marks=marks)


@pytest.mark.parametrize("s", [_known(s) for s in ANYWHERE])
def test_attack_is_not_paid(grader, s: Specimen) -> None:
    _check(grader, s, "cpu")


@pytest.mark.parametrize("s", FAIR, ids=lambda s: s.name)
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


@pytest.mark.parametrize(("layer", "attack", "passes"), [
    ("provenance", "f_product_cloned", True), ("cases", "e_mean_for_max", True), ("screen", "d_forged_ttir", True),
    ("firewall", "torch_fallback", False), ("lockdown", "c_grid_c_library", False), ("host", "python_lists", False),
    ("screen", "numpy_compute", False), ("constant", "constant_kernel", False),
])  # fmt: skip
def test_what_a_layer_is_worth(
    grader: Grader, monkeypatch: pytest.MonkeyPatch, layer: str, attack: str, passes: bool
) -> None:
    """Some attacks are held by one layer alone; most by several. The whole table is made by eval/zoo.py --layers."""
    (s,) = specimens(attack)
    # A layer is left out by grader and runner; the zygote between them is the same for all, and takes seconds to start.
    monkeypatch.setattr(grader, "without", Grader(without=[layer]).without)
    outcome = graded(grader, s, "cpu")
    assert outcome.correct is passes, outcome.message
    assert outcome.manifest["without"] == [layer]
    assert load_preset("default")(outcome) is None, "a weakened grader never pays"


def test_the_zoo_is_as_large_and_varied_as_its_page_says() -> None:
    assert len(ATTACKS) >= 80 and len({s.family for s in ATTACKS}) >= 20 and len({s.task for s in ATTACKS}) >= 25
    assert len(HONEST) >= 50
    page = (Path(__file__).parents[2] / "docs" / "zoo.md").read_text()
    assert [s.name for s in ATTACKS if f"| {s.name} |" not in page] == []
