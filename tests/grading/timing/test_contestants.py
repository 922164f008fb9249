"""What the grader believes of the two sides of a timing, and what it asks of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_device import FakeDevice
from puppet import puppet_session

from kbx_env.device.stopwatch import Stopwatch
from kbx_env.grading.runtime.untrusted import GradingAborted
from kbx_env.grading.timing import contestants
from kbx_env.grading.timing.precision import TRAINING
from kbx_env.spec.catalog import load_task

CASE = load_task("activation/gelu_fp16").timed[0]


@pytest.mark.parametrize(
    "us", [[], [0.0], [-1.0], [float("nan")], [float("inf")], [1.0, 2.0], [1e12], ["x"], None, [None]]
)
def test_times_that_cannot_be_are_refused(us: object) -> None:
    with pytest.raises(GradingAborted):
        contestants.RunnerContestant(puppet_session({"ok": True, "us": us}), CASE).measure([0])


def test_work_hidden_from_the_events_shows_on_the_wall_clock(monkeypatch) -> None:
    side = contestants.RunnerContestant(puppet_session({"ok": True}), CASE)
    now = [0.0]
    monkeypatch.setattr(contestants.time, "perf_counter", lambda: now[0])

    def ask(header: dict, *_: object, **__: object) -> object:
        now[0] += 17 * header["times"] * 100e-6
        return {"ok": True}, []

    monkeypatch.setattr(side.session, "ask", ask)
    assert side.audit(90.0, 17) is None
    with pytest.raises(GradingAborted, match="claims 50 us"):
        side.audit(50.0, 17)
    with pytest.raises(GradingAborted, match="claims 50 us"):
        side.audit(50.0, 17, own_us=60.0)
    assert "claims 50 us" in (side.audit(50.0, 17, own_us=90.0) or ""), "what held up eager is not this side's doing"


def test_the_first_replay_of_a_graph_may_take_longer_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It uploads the graph; a second attempt that is as short decides before one of a tenth of a second is made."""
    side = contestants.RunnerContestant(puppet_session({"ok": True}), CASE)
    now, replays = [0.0], list[int]()
    monkeypatch.setattr(contestants.time, "perf_counter", lambda: now[0])

    def ask(header: dict, *_: object, **__: object) -> object:
        now[0] += header["times"] * 17 * 50e-6 + (0 if replays else 5e-3)
        replays.append(header["times"])
        return {"ok": True}, []

    monkeypatch.setattr(side.session, "ask", ask)
    assert side.audit(50.0, 17, TRAINING.audit_us) is None
    assert len(replays) == 2 and replays[0] == replays[1] <= 1 + TRAINING.audit_us / (17 * 50)


def test_an_autotuner_at_work_in_a_timed_call_ends_it(monkeypatch) -> None:
    side = contestants.RunnerContestant(puppet_session({"ok": True, "us": [1.0], "tuned": 1}), CASE)
    with pytest.raises(GradingAborted, match="autotuner") as stop:
        side.measure([0])
    assert stop.value.violations[0].rule == "clock"


def test_graphs_hold_a_number_of_calls_that_nobody_knows(monkeypatch) -> None:
    side = contestants.RunnerContestant(puppet_session({"ok": True, "captured": True}), CASE)
    small = {side.capture(1 << 10) for _ in range(60)}
    assert len(small) > 5 and min(small) >= contestants.GRAPH_CALLS[0] and max(small) <= contestants.GRAPH_CALLS[1]
    assert {side.capture(1 << 30) for _ in range(9)} == {contestants.SLOTS}, "what fits into memory"
    assert {side.capture(1 << 10, 90_000.0) for _ in range(9)} == {contestants.SLOTS}, "what takes no second of everybody's time"
    # The most of nine numbers is missing among 300 draws with a chance of 5e-16; among 60 draws, once in 1200 runs.
    assert max(side.capture(1 << 10, 2_000.0) for _ in range(300)) == 15
    assert max(side.capture(1 << 10, 2_000.0, TRAINING.graph_us) for _ in range(300)) == 7


def test_solvers_of_small_matrices_are_judged_on_the_host_and_large_results_never() -> None:
    """One expert's six results without inputs (logspace: 512 MiB) once took a core four minutes, and everybody waited."""
    eig, logspace, rand = (load_task(t) for t in ("linearalgebra/eig", "random/logspace", "random/rand"))
    assert contestants.faster_on_host(eig, 20_000, 57_000.0) and contestants.faster_on_host(eig, 200_000, 42_000.0)
    assert not contestants.faster_on_host(eig, 32 << 20, 1500.0)
    assert not contestants.faster_on_host(logspace, 512 << 20, 400.0)
    assert not contestants.faster_on_host(rand, 1000, 1e6), "statistics look at all of a result"


@pytest.mark.parametrize("late", [False, True])
def test_a_baseline_that_keeps_the_device_waiting_is_bound_by_the_host(monkeypatch: pytest.MonkeyPatch, late: bool) -> None:
    """Beside four GPUs whose gradings ask the driver, eager's ``det`` took twice as long, and so did the speedup."""
    eager = contestants.EagerContestant(load_task("linearalgebra/det"), CASE, "cpu", Stopwatch("cpu", FakeDevice()))
    assert not eager.host_bound
    replies = iter([{"us": [9.0] * 5, "late": [0, 1, 2, 3, 4] if late else [3]}, {"us": [9.0], "late": [0]}])
    monkeypatch.setattr(eager.watch, "measure", lambda header: next(replies))
    eager.measure([0, 1, 2, 0, 1])
    eager.measure([0])
    assert eager.host_bound is late


def test_a_runner_is_told_what_memory_a_case_takes() -> None:
    """Two draws of x (400 bytes) and one of y (80): the values as they came, then the windows, then results beside these."""
    task = SimpleNamespace(written=lambda args: {"y"})
    session, case = SimpleNamespace(task=task), SimpleNamespace(args={})
    side = contestants.RunnerContestant(session, case)  # type: ignore[arg-type]
    x, y = torch.zeros(100), torch.zeros(10, dtype=torch.float64)
    draws: list[dict[str, Any]] = [{"x": x, "y": y, "n": 3}, {"x": x + 1}]
    values, most = 880, contestants.GRAPH_CALLS[1]
    assert side._memory(draws, 1000, 3) == (480, 3, values + most * (1000 + 80))
    few = contestants.BLOCK * ((1 << 30) + 80)
    assert side._memory(draws, 1 << 30, 2) == (480, 2, values + few), "of large results those of one block"


def test_late_calls_do_not_count_unless_most_are_late() -> None:
    us = [40.0, 41.0, 900.0, 40.5, 3000.0]
    assert contestants.in_time(us, [2, 4]) == [40.0, 41.0, 40.5]
    assert contestants.in_time(us, []) == us
    # A call that reads back is late every time: that is its time.
    assert contestants.in_time(us, [0, 1, 2, 3]) == us and contestants.in_time([5.0], [0]) == [5.0]
    assert contestants.in_time(us, [9, -1]) == us, "a submission may claim anything"
