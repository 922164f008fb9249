"""What is done for timing before a kernel is known to be right."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kbx_env.errors import SandboxError
from kbx_env.grading import compulsory_work
from kbx_env.grading.runtime.session import RunnerSession
from kbx_env.grading.runtime.time_budget import TimeBudget
from kbx_env.grading.runtime.untrusted import GradingAborted
from kbx_env.grading.timing import task_timing
from kbx_env.outcome import Verdict
from kbx_env.spec.catalog import load_task

TASK = load_task("activation/relu")


@pytest.fixture
def talk(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A session that notes what it is asked, and raises ``error`` for the command ``fails``."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=80 << 30))
    mine = SimpleNamespace(task=TASK, budget=TimeBudget(30.0), timed_begun=False, case_bytes=0, fails="", error=None)
    mine.asked, mine.sizes = list[str](), list[int]()

    def ask(header: dict[str, Any], blobs: Any = None, *, idle: bool = False) -> Any:
        assert idle, "nothing is launched, so nobody waits for the GPU"
        mine.budget.spend(5.0)
        mine.asked.append(header["do"])
        mine.sizes += [mine.case_bytes] if header["do"] == "prepare" else []
        if header["do"] == mine.fails:
            raise mine.error
        return {}, []

    mine.ask = ask
    mine.header = lambda args, seed: {"args": {}, "entry": "relu", "positional": []}
    mine.begin_timed = partial(RunnerSession.begin_timed, mine)
    return mine


def test_all_timed_cases_are_compiled_the_largest_first(talk: Any) -> None:
    task_timing.begin_compiling(TASK, talk, "published")
    cases = len(compulsory_work.fitting(TASK, 80 << 30, TASK.timed))
    assert talk.asked == ["prepare", "dry"] * cases + ["release"]
    assert talk.sizes == sorted(talk.sizes, reverse=True) and cases > 1
    assert talk.timed_begun and talk.budget.left == 30.0, "the submission has its whole time for the checked calls"


@pytest.mark.parametrize(
    "error", [GradingAborted(Verdict.TIMEOUT, "late"), SandboxError("the GPU's memory is full"), RuntimeError("CUDA out of memory")]
)
@pytest.mark.parametrize("fails", ["prepare", "dry", "release"])
def test_an_error_is_left_to_the_stage_where_it_belongs(fails: str, error: Exception, talk: Any) -> None:
    talk.fails, talk.error = fails, error
    task_timing.begin_compiling(TASK, talk, "published")
    assert not talk.timed_begun and talk.asked[-1] == "release" and talk.budget.left == 30.0
