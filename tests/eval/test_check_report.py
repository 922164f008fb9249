"""Checking a report: what holds, what does not, and what was made with other versions or tasks."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from kbx_env.eval import check_report, report

from kbx_env import versions
from kbx_env.errors import UsageError
from kbx_env.outcome import Cases, Fault, FaultKind, Outcome, Stage, Timing, Verdict


def grade(task: str, source: bytes, **options: Any) -> Outcome:
    """Expert kernels of category math are right."""
    common = {"task": task, "stage": Stage.CORRECT, "backend": options["backend"], "grading": options["grading"]}
    if task.startswith("math/"):
        return Outcome(verdict=Verdict.CORRECT, cases=Cases(2, 2), **common)
    return Outcome(verdict=Verdict.INCORRECT, fault=Fault.POLICY, message="off by 3", cases=Cases(1, 2), **common)


def lost(task: str, source: bytes, **options: Any) -> Outcome:
    return Outcome(
        task, Verdict.INFRA_FAULT, Stage.COMPILE, "cpu", "contract", Fault.INFRA, "no", fault_kind=FaultKind.UNSUPPORTED
    )  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("check") / "r"
    argv = ["--policy", "expert", "--backend", "cpu", "--tasks", "softmax,math/abs,erfc_sqrt,argmax", "--out", str(out)]

    def graded(task: str, source: bytes, **options: Any) -> Outcome:
        import dataclasses
        import hashlib

        return dataclasses.replace(grade(task, source, **options), source_sha256=hashlib.sha256(source).hexdigest())

    return report.run(report.parser().parse_args(argv), grade=graded)


def _changed(made: Path, to: Path, change: Any) -> Path:
    shutil.copytree(made, to)
    data = json.loads((to / "report.json").read_text())
    change(data)
    (to / "report.json").write_text(json.dumps(data))
    return to


def test_a_true_report_holds_and_the_draw_can_be_repeated(made: Path) -> None:
    found = check_report.check(made, grade=grade)
    assert found.holds and (len(found.graded), found.of) == (4, 4) and not found.differences and not found.sums
    assert check_report.lines(found)[-1].startswith("the report holds: 4 of 4")
    drawn = [[g.row.task for g in check_report.check(made, 2, seed, grade=grade).graded] for seed in (found.seed, found.seed)]
    assert drawn[0] == drawn[1] and len(set(drawn[0])) == 2


def test_a_forged_verdict_does_not_hold(made: Path, tmp_path: Path) -> None:
    def forge(data: dict[str, Any]) -> None:
        row = next(r for r in data["tasks"] if r["task"] == "reduce/argmax")
        row |= {"verdict": "correct", "correct": True, "fault": None, "cases": {**row["cases"], "passed": 2, "failures": []}}

    found = check_report.check(_changed(made, tmp_path / "r", forge), grade=grade)
    (wrong,) = [g for g in found.graded if g.problem]
    assert not found.holds and wrong.row.task == "reduce/argmax" and "graded again: incorrect" in str(wrong.problem)
    assert "own sums do not match" in found.sums[0]


def test_an_answer_of_another_source_is_not_checked_by_the_stored_one(made: Path, tmp_path: Path) -> None:
    found = check_report.check(
        _changed(made, tmp_path / "r", lambda data: data["tasks"][0].update(source_sha256="0" * 64)), grade=grade
    )
    assert not found.holds and [g.problem for g in found.graded if g.problem] == ["its source is not in gradings.sqlite"]


def test_other_versions_and_tasks_are_named_first(made: Path, tmp_path: Path) -> None:
    def older(data: dict[str, Any]) -> None:
        data["manifest"] |= {"task_set": "0-9", "task_set_hash": "f" * 64, "torch": "1.0"}

    found = check_report.check(_changed(made, tmp_path / "r", older), grade=grade)
    said = check_report.lines(found)
    assert said[0] == f"differs: task set: 0-9 in the report, {versions.TASK_SET} here"
    assert said[1].startswith("differs: task set hash: ffffffffffff in") and said[2].startswith("differs: torch: 1.0 in the report")
    assert found.holds and "made with other versions or tasks" in said[-1]


def test_what_gets_no_verdict_shows_nothing(made: Path) -> None:
    found = check_report.check(made, grade=lost)
    assert not found.holds and all(g.masked and g.problem is None for g in found.graded)
    assert check_report.lines(found)[0].startswith("not judged: expert on ")


def test_speedups_hold_within_their_intervals(made: Path) -> None:
    row = check_report.report_data.read(made).policies[0].rows[1]
    timed = check_report.Row(**{**vars(row), "verdict": "correct", "correct": True, "low": 1.9, "high": 2.1})

    def problem(low: float, high: float, same: bool = True) -> str | None:
        timing = Timing((low + high) / 2, low, high, None, (), "H200")
        outcome = Outcome("math/erfc_sqrt", Verdict.CORRECT, Stage.TIME, "cuda", "contract", cases=Cases(2, 2), timing=timing)
        return check_report.Regraded("p", timed, outcome, same).problem

    assert problem(2.05, 2.2) is None and problem(3.0, 3.1, same=False) is None
    assert "1.900x to 2.100x, timed again: 3.000x to 3.100x" in str(problem(3.0, 3.1))


def test_bad_usage(made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check_report.main([str(tmp_path)]) == 2 and "report.json" in capsys.readouterr().err
    shutil.copy(made / "report.json", tmp_path)
    assert check_report.main([str(tmp_path)]) == 2 and "gradings.sqlite" in capsys.readouterr().err
    with pytest.raises(UsageError, match="at least 1"):
        check_report.check(made, sample=0)
