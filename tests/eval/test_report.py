"""The report: nothing lost, nothing repeated, nothing invented."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from kbx_env.eval import report

from kbx_env.outcome import Cases, Fault, Outcome, Stage, Verdict


class Fake:
    """Grades without a sandbox; may be interrupted after a number of gradings."""

    def __init__(self, stop_after: int | None = None) -> None:
        self.seen: list[str] = []
        self.stop_after = stop_after

    def __call__(self, task: str, source: bytes, **options) -> Outcome:
        if self.stop_after is not None and len(self.seen) >= self.stop_after:
            raise KeyboardInterrupt
        self.seen.append(task)
        common = {"task": task, "stage": Stage.CORRECT, "backend": "cpu", "grading": "contract"}
        if task.startswith("math/"):
            return Outcome(verdict=Verdict.CORRECT, cases=Cases(2, 2), **common)
        if task.startswith("loss/"):
            return Outcome(verdict=Verdict.INFRA_FAULT, fault=Fault.INFRA, message="unsupported", **common)
        return Outcome(
            verdict=Verdict.INCORRECT, fault=Fault.POLICY, message="<b>off</b> by 3 | much", cases=Cases(1, 2), **common
        )


def _args(tmp_path: Path, *more: str):
    base = ["--policy", "expert", "--backend", "cpu", "--split", "all", "--out", str(tmp_path / "out")]
    return report.parser().parse_args([*base, *more])


def test_the_three_files(tmp_path: Path) -> None:
    out = report.run(_args(tmp_path), grade=Fake())
    data = json.loads((out / "report.json").read_text())
    assert data["policy"] == "expert" and {"manifest", "summary", "by_category", "tasks"} <= set(data)
    s = data["summary"]
    assert (s["n"], s["infra_faults"]) == (14, 1) and s["correct_rate"] == pytest.approx(1 / 14)
    assert s["faster_than_eager_rate"] is None and s["geomean_speedup"] is None
    page = (out / "report.html").read_text()
    assert "&lt;b&gt;off" in page and "<b>off</b>" not in page and "http" not in page and "<script" not in page
    assert "not measured" in (out / "report.md").read_text()


def test_killed_and_resumed_nothing_is_lost_or_repeated(tmp_path: Path) -> None:
    first, second = Fake(stop_after=5), Fake()
    with pytest.raises(KeyboardInterrupt):
        report.run(_args(tmp_path), grade=first)
    out = report.run(_args(tmp_path, "--resume"), grade=second)
    assert len(first.seen) == 5
    again = set(first.seen) & set(second.seen)
    assert all(t.startswith("loss/") for t in again), "only what was not judged is graded again"
    assert len(json.loads((out / "report.json").read_text())["tasks"]) == 15


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--policy", "exprt"], "expert"), (["--split", "test"], "train"), (["--tasks", "zzz*"], "zzz"),
        (["--grading", "papr"], "paper"), (["--backend", "gpu"], "cuda"), (["--workers", "0"], "at least 1"),
        (["--policy", "replay"], "replay:FILE"), (["--policy", "replay:/nowhere.jsonl"], "nowhere"),
        (["--targets", "sm_1"], "sm_90"), (["--policy", "python:nothing:here"], "module:attribute"),
    ],
)  # fmt: skip
def test_bad_usage_exits_2(more: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = report.main(["--policy", "expert", "--backend", "cpu", "--out", str(tmp_path / "o"), *more])
    assert code == 2 and says in capsys.readouterr().err


def test_an_earlier_report_is_not_mixed_with_a_new_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = report.run(_args(tmp_path), grade=Fake())
    assert report.main(["--policy", "expert", "--backend", "cpu", "--out", str(out)]) == 2
    assert "--resume" in capsys.readouterr().err
