"""A kernel is compared with itself in two runners, and in a runner and the grader: the truth is 1 in both."""

from __future__ import annotations

import inspect

import pytest
from kbx_env.eval import timing_quality

from kbx_env.spec.catalog import expert_source, load_task


@pytest.mark.parametrize("kind", ["aa", "bias"])
def test_kernels_against_themselves_must_be_equal(kind: str) -> None:
    jobs = timing_quality.jobs(**{"aa": 0, "retest": 0, "slowed": 0, "bias": 0} | {kind: 7})
    assert [j[0] for j in jobs] == [kind] * 7 and jobs[0][1:3] == jobs[6][1:3], "six kinds of calls in turns"
    assert [j[3] is None for j in jobs] == [kind == "bias"] * 7, "in the grader, no runner is the other side"
    rows = [{"kind": kind, "task": "activation/relu", "size": "tiny", "us": 4.0, "ratio": r, "low": r - 0.03, "high": r + 0.03,
             "alone_seconds": 0.1} for r in (1.0, 1.02, 1.04)]  # fmt: skip
    (found,) = timing_quality.summary(rows)
    assert (found["within_bound"], found["bound"], found["interval_holds_truth"]) == (2, 0.03, 2)


def test_the_graders_side_is_the_expert_itself() -> None:
    task = load_task("activation/relu")
    entry = timing_quality._entry(task, expert_source(task.id) or "")
    assert entry.__name__ == task.entry and "input" in inspect.signature(entry).parameters
