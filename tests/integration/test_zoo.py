"""Every exploit unpaid, every honest oddity paid: on the CPU backend here, on a GPU with ``-m gpu``."""

from __future__ import annotations

from pathlib import Path

import pytest
from _pytest.mark import ParameterSet
from kbx_env.eval.zoo import Specimen, graded, paid, specimens
from kbx_env.rewards.compose import load_preset

from kbx_env.grading.ablations import DefenceLayer
from kbx_env.grading.grader import Grader
from kbx_env.outcome import Fault

ATTACKS = specimens(honest=False)
HONEST = specimens(honest=True)
ANYWHERE = [s for s in ATTACKS if s.backend != "cuda"]
FAIR = [s for s in HONEST if s.backend != "cuda"]

LAYERS = {
    DefenceLayer.SCREEN: "d_forged_ttir",
    DefenceLayer.FIREWALL: "torch_fallback",
    DefenceLayer.HOST: "python_lists",
    DefenceLayer.LOCKDOWN: "d_grid_writes_file",
    DefenceLayer.KERNEL: "c_engine_memory",
    DefenceLayer.SECRET: "b_expected_table",
    DefenceLayer.CASES: "f_index_by_heart",
    DefenceLayer.DERIVED: "b_strides_of_three_axes",
    DefenceLayer.EFFECTS: "b_permute_lazy",
    DefenceLayer.REPEAT: "m_memo_by_address",
    DefenceLayer.CONSTANT: "constant_kernel",
    DefenceLayer.PROVENANCE: "f_product_cloned",
    DefenceLayer.SOURCE: "r_forged_by_names",
    DefenceLayer.CONTRACT: "e_nibble_alone",
    DefenceLayer.PROOF: "d_roll_by_copies",
    DefenceLayer.ABLATION: "canary_launch",
    DefenceLayer.REPROBE: "destroy_firewall",
}
"""An attack aimed at each layer: the default tier grades these. Most of them meet an earlier layer first."""
ODDITIES = {
    "comments_name_torch", "h_alias_annotated", "h_helper_compose", "k_argmax_atomic_keys", "k_symmetric_block_pointers",
    "persistent_while", "workspace_kept",
}  # fmt: skip
"""Honest kernels that the default tier grades."""


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


def _graded(found: list[Specimen], backend: str) -> list[ParameterSet]:
    """Parameters of a test: open attacks are expected to pass on the CPU, most specimens are left to the full tier."""
    params = []
    for s in found:
        marks = [] if s.name in {*LAYERS.values(), *ODDITIES} else [pytest.mark.full]
        if s.open and backend == "cpu":
            marks.append(pytest.mark.xfail(reason=s.open, strict=True))
        params.append(pytest.param(s, id=s.name, marks=marks))
    return params


@pytest.mark.parametrize("s", _graded(ANYWHERE, "cpu"))
def test_attack_is_not_paid(grader, s: Specimen) -> None:
    _check(grader, s, "cpu")


@pytest.mark.parametrize("s", _graded(FAIR, "cpu"))
def test_honest_oddity_is_paid(grader, s: Specimen) -> None:
    _check(grader, s, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("s", _graded(ATTACKS, "cuda"))
def test_attack_is_not_paid_on_gpu(grader, s: Specimen) -> None:
    _check(grader, s, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("s", _graded(HONEST, "cuda"))
def test_honest_oddity_is_paid_on_gpu(grader, s: Specimen) -> None:
    _check(grader, s, "cuda")


@pytest.mark.parametrize(("layer", "attack", "passes"), [
    ("provenance", "f_product_cloned", True), ("cases", "e_mean_for_max", True), ("source", "r_forged_by_names", True),
    ("derived", "b_strides_of_three_axes", True), ("repeat", "m_memo_by_address", True), ("screen", "d_forged_ttir", False),
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


def test_each_layer_of_defence_has_an_attack_in_the_default_tier() -> None:
    assert set(LAYERS) == set(DefenceLayer)
    assert {*LAYERS.values()} <= {s.name for s in ATTACKS} and {s.name for s in HONEST} >= ODDITIES
