"""The grader leaves the process that it grades in as it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kbx_env.grading import grader as module
from kbx_env.grading.grader import Grader
from kbx_env.outcome import Outcome, Stage, Verdict


@pytest.fixture
def two_threads() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("broken", [False, True])
def test_gradings_of_the_cpu_backend_take_one_core(two_threads: None, broken: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With two threads on two busy cores a grading took ten times as much processor time."""
    seen: list[int] = []

    def pipeline(context: Any) -> Outcome:
        seen.append(torch.get_num_threads())
        if broken:
            raise RuntimeError("a bug of the grader")
        return context.builder.end(Verdict.MALFORMED, Stage.SCREEN, "no function")

    monkeypatch.setattr(module, "run_pipeline", pipeline)
    with Grader() as grader:
        outcome = grader.grade("math/abs", "x = 1", backend="cpu")
    assert seen == [1] and torch.get_num_threads() == 2
    assert outcome.verdict is (Verdict.INFRA_FAULT if broken else Verdict.MALFORMED)
