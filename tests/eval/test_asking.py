"""Which tasks a policy is asked, and what an answer is said to have taken."""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from kbx_env.eval import report
from kbx_env.eval.pages.formatting import manifest_line
from kbx_env.eval.runner import Answer, Asker, ask_all

from kbx_env.errors import UsageError
from kbx_env.executor import Executor, InlinePool
from kbx_env.outcome import Fault, Outcome, Stage, Verdict
from kbx_env.spec.catalog import load_tasks
from kbx_env.store import Store


def slow(task: str, source: bytes, **options: object) -> Outcome:
    """Grades for a twentieth of a second, and says so."""
    time.sleep(0.05)
    return Outcome(
        task, Verdict.INCORRECT, Stage.CORRECT, "cpu", "contract", Fault.POLICY, "no", seconds={"total": 0.05}
    )


def test_an_answer_takes_its_own_time_and_not_that_of_all_before_it(tmp_path: Path) -> None:
    tasks = load_tasks()[:12]
    policy = SimpleNamespace(act=lambda observation: "x = 1", name="p", concurrency=12)
    store = Store(tmp_path / "s.sqlite")
    with contextlib.closing(store), Executor(InlinePool(slow)) as executor:
        asker = Asker("p", policy, {"backend": "cpu"}, {"device": "cpu"}, store, executor)
        answers: list[Answer] = [a for *_, a in ask_all([asker], tasks)]
    took = [a.seconds for a in answers if a.seconds is not None]
    assert len(took) == 12 and sum(took) == pytest.approx(12 * 0.05, rel=0.5), "the last waited for half a second"


def test_only_answered_tasks_are_asked_on_demand(tmp_path: Path) -> None:
    tasks = load_tasks(pattern="math/*")
    names = frozenset(("math/cos", "math/abs", "loss/mse_loss"))
    policy = SimpleNamespace(act=lambda observation: "x = 1", name="p", answered=names)
    store = Store(tmp_path / "s.sqlite")
    with contextlib.closing(store), Executor(InlinePool(slow)) as executor:
        common = ("p", policy, {"backend": "cpu"}, {"device": "cpu"}, store, executor)
        assert {name for _, name, *_ in ask_all([Asker(*common, True)], tasks)} == {"math/cos", "math/abs"}
        assert Asker(*common).asked(tasks) == tasks, "without the option the others count as wrong"
        policy.answered = None
        assert Asker(*common, True).asked(tasks) == tasks, "an expert answers all"
        policy.answered = names
        with pytest.raises(UsageError, match="none of the .* it answers loss/mse_loss, math/abs"):
            Asker(*common, True).asked(load_tasks(pattern="reduce/*"))


def test_a_report_says_that_a_replay_was_asked_only_what_it_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[dict] = []
    monkeypatch.setattr(report.pages, "write", lambda out, reports, **more: written.extend(reports))
    answers = tmp_path / "answers.jsonl"
    answers.write_text(json.dumps({"task": "math/abs", "predict": "x = 1"}))
    argv = ["--policy", f"replay:{answers}", "--policy", "zeros", "--answered", "--backend", "cpu", "--split", "all",
            "--tasks", "math/*", "--targets", "none", "--out", str(tmp_path / "r")]  # fmt: skip
    report.run(report.parser().parse_args(argv), slow)
    replay, zeros = written
    assert [r["task"] for r in replay["tasks"]] == ["math/abs"] and replay["manifest"]["tasks"] == 1
    assert len(zeros["tasks"]) == zeros["manifest"]["tasks"] > 30
    assert "tasks asked: answered" in manifest_line(replay["manifest"])
