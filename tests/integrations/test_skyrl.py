"""SkyRL-gym: the environment as SkyRL makes and plays it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

skyrl_gym = pytest.importorskip("skyrl_gym", reason="needs the extra skyrl")
import pyarrow.parquet  # noqa: E402
from skyrl_gym.envs import register  # noqa: E402

from kbx_env.errors import UsageError  # noqa: E402
from kbx_env.integrations.skyrl import ENV, KernelTextEnv, write_rows  # noqa: E402

TASK, WRONG = "random/logspace", 0.1 + 0.3 * 0.5


def test_an_episode(grader: Any, tmp_path: Path) -> None:
    register(id=ENV, entry_point="kbx_env.integrations.skyrl:KernelTextEnv")
    file = write_rows(tmp_path / "train.parquet", category="random", backend="cpu")
    row = next(r for r in pyarrow.parquet.read_table(file).to_pylist() if r["task"] == TASK)
    env = skyrl_gym.make(row["env_class"], env_config={"max_turns": 2}, extras=row, grader=grader)
    messages, info = env.init(row["prompt"])
    assert messages == row["prompt"] and info == {"task": TASK} and row["reward_spec"]["ground_truth"] == TASK
    wrong = env.step("BAD")
    assert wrong["reward"] == WRONG and not wrong["done"] and wrong["observations"][0]["role"] == "user"
    assert "Verdict: incorrect" in wrong["observations"][0]["content"] and wrong["metadata"]["verdict"] == "incorrect"
    right = env.step("```python\n# GOOD\n```")
    assert right["reward"] == 1.0 and right["done"] and right["observations"] == []
    assert env.get_metrics() | {"solved": 1.0, "turns": 2, "masked": 0.0, "terms/correct": 1.0} == env.get_metrics()
    mean = KernelTextEnv.aggregate_metrics([env.get_metrics(), env.get_metrics()])
    assert mean["solved"] == 1.0


def test_a_lost_grading_ends_the_episode_and_is_counted(grader: Any) -> None:
    env = KernelTextEnv({"max_turns": 3}, {"task": TASK}, grader)
    lost = env.step("LOST")
    assert lost["reward"] == 0.0 and lost["done"] and lost["metadata"]["masked"] and env.get_metrics()["masked"] == 1.0
    with pytest.raises(UsageError, match="no 'task'"):
        KernelTextEnv({}, {})
