"""Estimates: marked as such, in order, from nothing that a submission claims."""

from __future__ import annotations

import pytest
from kbx_env.rewards.compose import load_preset

from kbx_env.__main__ import main
from kbx_env.envs.prompt import feedback
from kbx_env.errors import UnknownName
from kbx_env.outcome import Outcome
from kbx_env.spec.catalog import expert_source

GELU = expert_source("activation/gelu_fp16") or ""


def _estimate(grader, source: str, task: str = "activation/gelu_fp16", **more) -> Outcome:
    return grader.grade(task, source, backend="cpu", targets=(), estimate="h200", **more)


def test_an_estimate_says_that_it_is_one(grader) -> None:
    outcome = _estimate(grader, GELU)
    found = outcome.estimate
    assert outcome.correct and outcome.timing is None and outcome.speedup is None
    assert found.device == "h200" and 0 < found.estimated_share <= 1 and len(found.cases) == 3
    assert "fitted" in found.constants
    small, _, large = (c.estimated_us for c in found.cases)
    assert 11 < small < 44 and 75 < large < 290  # measured on an H200: 22 and 145 us
    assert "not measured" in feedback(outcome)
    assert Outcome.from_dict(outcome.to_dict()) == outcome


def test_a_better_kernel_is_estimated_faster(grader) -> None:
    assert GELU.count("128 * bytes") == 1
    slow = _estimate(grader, GELU.replace("128 * bytes", "4 * bytes")).estimate
    assert slow.estimated_us > 1.5 * _estimate(grader, GELU).estimate.estimated_us


def test_what_depends_on_a_result_is_not_estimated(grader) -> None:
    outcome = _estimate(grader, expert_source("index/masked_select") or "", "index/masked_select")
    assert outcome.correct and outcome.estimate is None


def test_a_seed_is_no_result(grader) -> None:
    outcome = _estimate(grader, expert_source("random/rand") or "", "random/rand")
    assert outcome.correct and outcome.estimate is not None


def test_the_preset_pays_for_it_on_the_cpu_only(grader) -> None:
    preset, default = load_preset("estimated"), load_preset("default")
    assert preset.estimate == "h200" and default.estimate is None
    assert preset.range("cpu") == (0.0, 2.0) and preset.range("cuda") == default.range("cuda")
    outcome = _estimate(grader, GELU)
    assert default(outcome) == 1.0 < preset(outcome) < 2.0
    assert preset(grader.grade("activation/gelu_fp16", GELU, backend="cpu", targets=())) == 1.0
    assert preset(_estimate(grader, "def gelu_fp16(input, approximate='none'):\n    return input\n")) < 1.0


def test_an_unknown_device_is_named(grader, capsys, tmp_path) -> None:
    with pytest.raises(UnknownName, match="h200"):
        grader.grade("math/softmax", "x", backend="cpu", estimate="h20")
    path = tmp_path / "k.py"
    path.write_text(GELU)
    assert main(["grade", "activation/gelu_fp16", str(path), "--backend", "cpu", "--estimate", "h20"]) == 2
    assert "h200" in capsys.readouterr().err
