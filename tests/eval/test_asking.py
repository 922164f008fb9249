"""What an answer is said to have taken."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from kbx_env.eval.runner import Answer, Asker, ask_all

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
