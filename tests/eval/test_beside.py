"""The same answers under the other grading."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from kbx_env.eval import report

from kbx_env.outcome import Cases, Fault, Outcome, Stage, Verdict

pytestmark = pytest.mark.usefixtures("no_figures")


class Both:
    """Some tasks are right under one grading only; one is masked under the other."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str]] = []

    def __call__(self, task: str, source: bytes, **options) -> Outcome:
        grading = options["grading"]
        self.seen.append((task, grading))
        right = {"math/cos": ("contract", "paper"), "math/pow": ("paper",), "math/softmax": ("contract",)}.get(task, ("contract",))
        if task == "random/rand" and grading == "paper":
            return Outcome(task, Verdict.INFRA_FAULT, Stage.CORRECT, "cpu", grading, Fault.INFRA, "lost")
        if grading in right:
            return Outcome(task, Verdict.CORRECT, Stage.CORRECT, "cpu", grading, cases=Cases(1, 1), source_sha256=_sha(source))
        return Outcome(task, Verdict.INCORRECT, Stage.CORRECT, "cpu", grading, Fault.POLICY, f"off under {grading}", Cases(0, 1),
                       source_sha256=_sha(source))  # fmt: skip


def _sha(source: bytes) -> str:
    import hashlib

    return hashlib.sha256(source).hexdigest()


@pytest.mark.parametrize("grading", ["contract", "paper"])
def test_what_differs_is_told_and_graded_once(grading: str, tmp_path: Path) -> None:
    argv = ["--policy", "expert", "--backend", "cpu", "--split", "all", "--tasks", "math/cos,math/pow,math/softmax,random/rand"]
    other = {"contract": "paper", "paper": "contract"}[grading]
    argv += ["--gradings", f"{grading},{other}", "--out", str(tmp_path / "out")]
    grade, again = Both(), Both()
    out = report.run(report.parser().parse_args(argv), grade=grade)
    data = json.loads((out / "report.json").read_text())
    assert data["beside"]["grading"] == other
    assert data["beside"]["by_category"] == {"math": {"n": 3, "contract": 2, "paper": 2}}
    assert sum(data["beside"]["reasons"]["paper"].values()) == sum(data["beside"]["reasons"]["contract"].values()) == 1
    page = (out / "report.md").read_text()
    assert "Under two gradings" in page and "first reason" in page
    differs = {r["task"]: (r["contract"], r["paper"], r["message"]) for r in data["beside"]["differs"]}
    assert differs["math/pow"] == ("incorrect", "correct", "off under contract")
    assert differs["math/softmax"] == ("correct", "incorrect", "off under paper")
    assert "math/cos" not in differs and "random/rand" not in differs, "what is masked says nothing"
    report.run(report.parser().parse_args([*argv, "--resume"]), grade=again)
    assert {t for t, _ in again.seen} <= {"random/rand"}
