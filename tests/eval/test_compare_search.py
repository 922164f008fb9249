"""Searches at equal budgets: what is counted, what is hidden, what is drawn."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
from kbx_env.eval import compare_search, curves

from kbx_env.envs.episode import Episode, Trajectory
from kbx_env.extras import install_hint
from kbx_env.outcome import Cases, Estimate, Fault, Outcome, Stage, Verdict
from kbx_env.spec.catalog import expert_source
from kbx_env.spec.task import Task


def grade(task: str, source: str, **options: Any) -> Outcome:
    """Sources are numbers of microseconds; the project's own kernel takes 100."""
    if source.startswith("stop"):
        raise KeyboardInterrupt
    us = 100.0 if source == (expert_source(task) or "") else float(source)
    if us < 0:
        return Outcome(task, Verdict.INCORRECT, Stage.CORRECT, "cpu", "contract", Fault.POLICY, "off", Cases(0, 1))
    estimate = Estimate(options["estimate"], us, 1.0, (), "")
    return Outcome(task, Verdict.CORRECT, Stage.EVIDENCE, "cpu", "contract", cases=Cases(1, 1), estimate=estimate)


class Steps:
    """Submits some sources one after the other, and hands in the last."""

    name = "steps"

    def __init__(self, *sources: str) -> None:
        self.sources, self.seen = sources, []  # type: ignore[var-annotated]

    def run(self, task: Task, env: Episode) -> Trajectory:
        for k, s in enumerate(self.sources):
            self.seen += env.grade([s], round=k)
        return Trajectory(self.sources[-1], turns=tuple(env.turns))


@pytest.fixture
def play(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    def run(*policies: Any, **more: str) -> tuple[int, Any]:
        made = {f"p{k}": p for k, p in enumerate(policies)}
        monkeypatch.setattr(compare_search, "make_policy", lambda spec, access: made[spec])
        options = {"tasks": "math/softmax,activation/relu", "evals": "4", "seeds": "2", "backend": "cpu"} | more
        argv = [a for name in made for a in ("--policy", name)] + ["--out", str(tmp_path / "out"), "--overwrite"]
        status = compare_search.main([*argv, *(a for k, v in options.items() for a in (f"--{k}", v))], grade)
        file = tmp_path / "out" / "compare.json"
        return status, json.loads(file.read_text()) if file.exists() else None

    return run


def test_curves_of_the_best_so_far(play: Any, tmp_path: Path) -> None:
    status, told = play(Steps("-1", "200", "50", "80"), Steps("100"))
    assert status == 0 and len(told["runs"]) == 8 and not told["interrupted"]
    rows = told["summary"]["policies"]["p0"]["by_gradings"]
    assert [r["mean"] and round(r["mean"], 6) for r in rows] == [None, *(round(math.log(v), 6) for v in (0.5, 2, 2))]
    assert [r["known"] for r in rows] == [0, 4, 4, 4]
    end = told["summary"]["policies"]["p0"]
    # What it handed in is what it chose, not the best that it happened to grade.
    assert end["handed_in"]["mean"] == pytest.approx(math.log(100 / 80)) and end["correct_share"] == 0.75
    assert (tmp_path / "out" / "compare.png").read_bytes()[:4] == b"\x89PNG"


def test_the_yardstick_is_hidden_and_the_budget_holds(play: Any) -> None:
    greedy = Steps(*["90"] * 9)
    status, told = play(greedy, seeds="1")
    assert status == 0 and all(o.estimate is None and o.correct for o in greedy.seen)
    assert all(len(r["gradings"]) == 4 and r["cut"] and r["handed_in"] is None for r in told["runs"])


def test_a_policy_that_plans_is_told_the_budget(play: Any) -> None:
    planner = Steps("100")
    planner.evals = 99  # type: ignore[attr-defined]
    assert play(planner)[0] == 0 and planner.evals == 4  # type: ignore[attr-defined]


def test_an_interruption_keeps_what_there_is(play: Any) -> None:
    status, told = play(Steps("50"), Steps("stop"), tasks="math/softmax")
    assert status == 130 and told["interrupted"] and [r["policy"] for r in told["runs"]] == ["p0"]


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["--policy", "expert"], "not episodic"), (["--policy", "nobody"], "unknown policy"),
        (["--policy", "template-search:greedy"], "random or halving"), (["--tasks", "nothing/*"], "unknown task pattern"),
        (["--evals", "0"], "--evals is 0"), (["--gpu", "abacus"], "unknown device"), (["--limit", "-1"], "--limit"),
    ],
)  # fmt: skip
def test_bad_usage_ends_with_2(argv: list[str], text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = ["--policy", "template-search:random", "--tasks", "math/softmax", "--backend", "cpu", "--out", str(tmp_path)]
    if argv[0] == "--policy":
        base = base[2:]
    assert compare_search.main([*base, *argv], grade) == 2
    told = capsys.readouterr().err
    assert text in told and told.count("\n") == 1


def test_an_earlier_comparison_is_not_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "compare.json").write_text("{}")
    assert compare_search.main(["--policy", "template-search", "--out", str(tmp_path)], grade) == 2
    assert "--overwrite" in capsys.readouterr().err


def test_without_matplotlib_the_extra_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert compare_search.main(["--policy", "template-search", "--out", str(tmp_path)], grade) == 2
    assert install_hint("report") in capsys.readouterr().err
    assert not (tmp_path / "compare.json").exists()


def test_intervals_hold_the_mean_and_need_two_runs() -> None:
    runs = [{"task": t, "v": v} for t, v in (("a", 1.0), ("a", 2.0), ("b", 5.0), ("b", None))]
    row = curves.mean_of(runs, lambda r: r["v"])
    assert row["mean"] == pytest.approx((1.5 + 5.0) / 2) and (row["known"], row["runs"]) == (3, 4)
    assert 1.0 <= row["low"] <= row["mean"] <= row["high"] <= 5.0
    assert curves.mean_of(runs[2:], lambda r: r["v"])["low"] is None
