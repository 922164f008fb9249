"""A resumed report reads what it has in few statements, and each grading once."""

from __future__ import annotations

import contextlib
import math
import sqlite3
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from kbx_env.eval import plots, report
from kbx_env.eval.report_data import from_reports

from kbx_env.outcome import Cases, Outcome, Stage, Verdict
from kbx_env.store import schema

pytestmark = pytest.mark.usefixtures("no_figures")
SAMPLES = 40


class Many:
    """As a model: many answers, and never asked again."""

    name = "many"

    def samples(self, task: str) -> int:
        return SAMPLES

    def act(self, observation: Mapping[str, Any]) -> str:
        return f"# {observation['sample']}\n"


def _run(folder: Path, *more: str, calls: list[str] | None = None) -> str:
    def grade(task: str, source: bytes, **options: Any) -> Outcome:
        if calls is not None:
            calls.append(task)
        return Outcome(task, Verdict.CORRECT, Stage.CORRECT, "cpu", "contract", cases=Cases(2, 2), manifest={"torch": "2"})

    few = ["--tasks", "cos,softmax", "--backend", "cpu", "--split", "all", "--out", str(folder)]
    out = report.run(report.parser().parse_args(["--policy", "many", *few, *more]), grade=grade)
    return (out / "report.json").read_text().split(',\n "tasks": [')[1]


def test_stored_gradings_are_read_at_once_and_unpacked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kbx_env.baselines.policy.make_policy", lambda spec, access=None: Many())
    _run(tmp_path)
    with contextlib.closing(sqlite3.connect(tmp_path / "gradings.sqlite")) as db:
        db.execute("DELETE FROM gradings WHERE sample = 7")  # as if it had been killed before
        db.commit()
    said, unpacked, graded = [], [], list[str]()
    connect, unpack = schema.connect, schema.unpack_outcome

    def traced(path: Path) -> sqlite3.Connection:
        db = connect(path)
        db.set_trace_callback(said.append)
        return db

    def counted(data: bytes) -> dict[str, Any]:
        unpacked.append(data)
        return unpack(data)

    monkeypatch.setattr(schema, "connect", traced)
    monkeypatch.setattr(schema, "unpack_outcome", counted)
    rows = _run(tmp_path, "--resume", calls=graded)
    assert sorted(graded) == ["math/cos", "math/softmax"], "what is missing, and nothing else"
    assert rows.count('"sample": ') == 2 * SAMPLES
    assert len(unpacked) <= 2 * SAMPLES, "each once; the tasks' pages read sources alone"
    work = [s for s in said if not s.startswith(("PRAGMA", "BEGIN", "COMMIT", "ROLLBACK"))]
    assert len(work) < SAMPLES, "no statement for each row"
    del said[:], unpacked[:]
    assert _run(tmp_path, "--resume", calls=graded).count('"correct": true') == 2 * SAMPLES and len(graded) == 2
    assert len(unpacked) == 2 * SAMPLES and not [s for s in said if s.startswith(("BEGIN IMMEDIATE", "INSERT"))]


def test_the_curve_of_pass_at_k_takes_no_binomial_coefficients(monkeypatch: pytest.MonkeyPatch) -> None:
    for n, correct in ((1, 0), (7, 3), (60, 60), (500, 2)):
        exact = [report.pass_at_k(n, correct, k) for k in range(1, n + 1)]
        assert report.pass_curve(n, correct, n) == pytest.approx(exact, abs=1e-12)
    rows = [
        {"task": "math/cos", "category": "math", "difficulty": 1, "sample": k, "verdict": "correct", "correct": k % 3 == 0,
         "compiled": True, "message": "", "spent": {}, "turns": []} for k in range(300)
    ]  # fmt: skip
    made: list[int] = []
    comb = math.comb
    monkeypatch.setattr(math, "comb", lambda n, k: made.append(k) or comb(n, k))  # type: ignore[func-returns-value]
    figures = plots.figures(from_reports([{"policy": "p", "manifest": {"timed": False}, "tasks": rows}]))
    assert "pass_at_k" in figures and len(made) < 100
