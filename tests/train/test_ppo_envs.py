"""Envs of a PPO run side by side: one step of all is what each alone would have done, graded at the same time."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("omegaconf")
from kbx_env.train.ppo_envs import Together, side_by_side  # noqa: E402

from kbx_env.envs.schedule import SLOTS  # noqa: E402
from kbx_env.envs.schedule_env import ScheduleEnv  # noqa: E402
from kbx_env.outcome import Cases, Estimate, Evidence, Fault, Outcome, Stage, Verdict  # noqa: E402

WARPS = SLOTS.index("warps")
OPTIONS = {"tasks": "math/add", "split": "all", "backend": "cpu", "relative": True}


def fake_grade(task: str, source: str, **options: object) -> Outcome:
    """Eight warps are best; one is lost by the machine."""
    common = {"task": task, "stage": Stage.CORRECT, "backend": "cpu", "grading": "contract"}
    if "num_warps=1)" in source:
        return Outcome(verdict=Verdict.INFRA_FAULT, fault=Fault.INFRA, **common)
    made = Estimate("h200", 1.0, 0.9 if "num_warps=8)" in source else 0.4, (), "")
    return Outcome(verdict=Verdict.CORRECT, cases=Cases(4, 4, (), 4, 4), evidence=Evidence(1), estimate=made, **common)


class Grader:
    """Counts what it is asked, and how much of it at the same time."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.now = self.most = 0
        self._lock, self._together = threading.Lock(), threading.Barrier(3, timeout=20)

    def __call__(self, task: str, source: str, **options: object) -> Outcome:
        with self._lock:
            self.asked.append(source)
            self.now += 1
            self.most = max(self.most, self.now)
        if len(self.asked) < 4:
            self._together.wait()  # only if three are at work at once
        with self._lock:
            self.now -= 1
        return fake_grade(task, source, **options)


def _moves(*warps: int) -> np.ndarray:
    made = np.tile(ScheduleEnv.DEFAULT, (len(warps), 1))
    made[:, WARPS] += warps
    return made


def test_a_step_of_all_is_what_each_does_alone(tmp_path: Path) -> None:
    grader = Grader()
    envs = Together(4, tmp_path / "steps", 3, grader, {**OPTIONS, "store": tmp_path / "s"})
    alone = ScheduleEnv(**OPTIONS, grade=fake_grade)
    try:
        envs.reset(seed=0)
        moves = _moves(1, 1, 0, -2)
        seen, rewards, ended, cut, info = envs.step(moves)
        for k, action in enumerate(moves):
            alone.reset(seed=k)
            one, reward, over, _, told = alone.step(action)
            np.testing.assert_array_equal(seen[k], one)
            assert (rewards[k], ended[k], info["masked"][k]) == (reward, over, told["masked"])
        assert not cut.any() and rewards[0] > 0 and info["masked"].tolist() == [False, False, False, True]
        # Equal schedules are one grading, the expert's own among them; what the machine lost is asked for twice, and masked.
        assert grader.most == 3 and len(set(grader.asked)) == 3 and len(grader.asked) == 4
        rows = [json.loads(line) for line in (tmp_path / "steps").read_text().splitlines()]
        assert [r["masked"] for r in rows] == info["masked"].tolist() and sum(r["gradings"] for r in rows) == 3
        # After an episode's end comes a reset, which wants nothing graded; then what is known is not graded again.
        envs.step(moves)
        envs.step(_moves(1, 0, 0, 1))
        assert len(grader.asked) == 4
    finally:
        envs.close()
        alone.close()


def test_a_batch_is_one_step_of_all_where_that_is_possible() -> None:
    assert [side_by_side(*b) for b in ((16, 1), (33, 3), (128, 1), (6, 6), (7, 1))] == [16, 11, 64, 1, 7]
