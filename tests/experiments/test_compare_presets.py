"""Presets taught to policies that choose at a few places: what is easy is learnt, a hint helps where all else ties."""

from __future__ import annotations

import importlib.util
from argparse import Namespace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from kbx_env.outcome import Cases, Fault, Outcome, Stage, Verdict

pytest.importorskip("datasets")
FILE = Path(__file__).parents[2] / "experiments/preset_comparison/compare_presets.py"
RIGHT = np.array([1.0] + [0.0] * 63)


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("preset_places", FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_where_one_in_thousands_is_right_a_hint_finds_it_and_nothing_else_does(script: ModuleType) -> None:
    left = np.array([1 - bin(k).count("1") / 6 for k in range(64)])  # places that are not faulty
    plain, hinted = RIGHT.copy(), RIGHT + (RIGHT == 0) * 0.01 * left
    rates = {n: script.learn(r, RIGHT, 0.8, 0.1, 8, 60, 0) for n, r in (("plain", plain), ("hinted", hinted))}
    assert rates["plain"].shape == (8, 60) and rates["hinted"][:, -6:].mean() > 0.75 > 0.3 > rates["plain"][:, -6:].mean()
    assert (rates["plain"] == script.learn(plain, RIGHT, 0.8, 0.1, 8, 60, 0)).all()
    # GRPO divides by the deviation of the group: a hint tells as much whatever it pays, if nothing else differs.
    tenth = script.learn(RIGHT + (RIGHT == 0) * 0.001 * left, RIGHT, 0.8, 0.1, 8, 60, 0)
    assert tenth[:, -6:].mean() > 0.75
    told = script.compared(rates)
    assert told["hinted"]["final"] > told["plain"]["final"] and told["plain"].keys() == {"final", "needed"}
    if told["plain"]["needed"]:
        assert told["hinted"]["value"] < 1


def test_no_first_rate_no_target(script: ModuleType) -> None:
    never, always = np.zeros((4, 40)), np.ones((4, 40))
    told = script.compared({"first": never, "other": always})
    assert told["first"]["needed"] is None and told["other"]["needed"] is None and told["other"]["value"] is None


def test_policies_are_taught_what_presets_pay(script: ModuleType) -> None:
    def outcome(right: bool) -> Outcome:
        verdict, fault = (Verdict.CORRECT, None) if right else (Verdict.INCORRECT, Fault.POLICY)
        return Outcome("t/t", verdict, Stage.CORRECT, "cpu", "contract", fault, cases=Cases(int(right), 1))

    asked = Namespace(gradings=10 * 64, odds=0.5, rate=0.2, runs=2, seed=0, oracle=None)
    made = script.taught([outcome(k == 0) for k in range(4)], ["default", "quantization"], asked)
    assert (made["default"] == made["quantization"]).all() and made["default"].shape == (2, 10)
    assert made["default"][:, -1].mean() > made["default"][:, 0].mean()


def test_an_oracle_knows_what_no_preset_can_see(script: ModuleType) -> None:
    wrong = Outcome("t/t", Verdict.INCORRECT, Stage.CORRECT, "cpu", "contract", Fault.POLICY, cases=Cases(0, 1))
    right = Outcome("t/t", Verdict.CORRECT, Stage.CORRECT, "cpu", "contract", cases=Cases(1, 1))
    asked = Namespace(gradings=60 * 64, odds=0.8, rate=0.1, runs=4, seed=0, oracle=0.1)
    made = script.taught([right, *[wrong] * 63], ["default"], asked)
    assert list(made) == ["default", "oracle"] and made["oracle"][:, -6:].mean() > 0.75 > 0.3 > made["default"][:, -6:].mean()


@pytest.mark.parametrize(
    "more", [["--odds", "1"], ["--runs", "1"], ["--oracle", "0"], ["--presets", "no_such"], ["--tasks", "nothing"]]
)
def test_bad_usage(script: ModuleType, more: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        script.main([str(tmp_path / "o.json"), *more])
    assert stopped.value.code == 2 and capsys.readouterr().err.count("error:") == 1 and not (tmp_path / "o.json").exists()
