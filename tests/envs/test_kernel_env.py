"""KernelEnv: the gymnasium contract, episodes, masks, vector envs, and a clean end."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import time

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

import kbx_env
from kbx_env.envs.kernel_env import KernelEnv
from kbx_env.errors import UnknownName, UsageError
from kbx_env.outcome import CaseFailure, Cases, Evidence, Fault, Outcome, Passing, Stage, Verdict

TASK = "activation/gelu_fp16"


def fake_grade(task: str, source: str, **options) -> Outcome:
    source = source.strip()
    common = {"task": task, "stage": Stage.CORRECT, "backend": "cpu", "grading": options["grading"]}
    evidence = Evidence(1, True)
    if source == "lost":
        return Outcome(verdict=Verdict.INFRA_FAULT, fault=Fault.INFRA, **common)
    if source == "right":
        return Outcome(verdict=Verdict.CORRECT, cases=Cases(4, 4, (), 4, 4), evidence=evidence, **common)
    failed = Cases(1, 4, (CaseFailure("*=(5,)", "wrong values: worst error is 3x the tolerance"),), 1, 4)
    return Outcome(verdict=Verdict.INCORRECT, fault=Fault.POLICY, cases=failed, evidence=evidence, **common)


def _env(**more) -> KernelEnv:
    return KernelEnv(task=TASK, backend="cpu", grade=fake_grade, **more)


@pytest.mark.filterwarnings("error")
def test_check_env_is_clean() -> None:
    check_env(_env(), skip_render_check=True)


def test_check_env_is_clean_with_the_real_grader() -> None:
    """Equal steps give equal outcomes, whatever seconds they took."""
    env = gymnasium.make("kbx/Kernel-v0", task=TASK, backend="cpu", targets=(), grading_seed=1).unwrapped
    check_env(env, skip_render_check=True)
    env.close()


def test_the_package_shows_its_public_names() -> None:
    assert {"grade", "grade_many", "load_tasks", "Outcome", "KernelEnv", "Policy"} <= set(dir(kbx_env))
    assert all(getattr(kbx_env, name) is not None for name in kbx_env.__all__)


def test_made_by_its_id() -> None:
    env = gymnasium.make("kbx/Kernel-v0", task=TASK, backend="cpu", grade=fake_grade, render_mode="ansi")
    seen, info = env.reset(seed=1)
    assert seen["task"] == info["task"] == TASK and seen["feedback"] == "" and "gelu_fp16" in seen["prompt"]
    seen, reward, terminated, truncated, info = env.step("wrong")
    assert not terminated and not truncated and reward == pytest.approx(0.1 + 0.3 / 4)
    assert "3x the tolerance" in seen["feedback"] and info["outcome"].verdict is Verdict.INCORRECT
    assert "turn 1/4" in env.render()
    _, reward, terminated, truncated, _ = env.step("right")
    assert terminated and not truncated and reward == pytest.approx(1.0)
    env.close()


def test_the_sizes_that_are_timed_are_an_option() -> None:
    asked = []

    def grade(task: str, source: str, **options) -> Outcome:
        asked.append(options["sizes"])
        return fake_grade(task, source, **options)

    for more in ({}, {"sizes": "held-out"}):
        env = KernelEnv(task=TASK, backend="cpu", grade=grade, **more)
        env.reset(seed=0)
        env.step("right")
    assert asked == ["published", "held-out"]


def test_the_turn_limit_truncates() -> None:
    env = _env(max_turns=2)
    env.reset(seed=0)
    assert env.step("wrong")[2:4] == (False, False)
    assert env.step("wrong")[2:4] == (False, True)


def half_right(task: str, source: str, **options) -> Outcome:
    """As ``fake_grade``, with the evidence that the shaping terms of ``fusion`` pay."""
    graded = fake_grade(task, source, **options)
    evidence = Evidence(1, True, passing=Passing(1, 1, 100, 100, 0, 0))
    return graded if source == "lost" else dataclasses.replace(graded, evidence=evidence)


def test_shaping_adds_up_to_nothing_over_an_episode() -> None:
    """A preset with shaping, more turns than one: default's reward and a potential that the last turn takes back."""
    env = KernelEnv(task=TASK, backend="cpu", grade=half_right, reward="fusion", gamma=0.5)
    env.reset(seed=0)
    steps = [env.step(source) for source in ("wrong", "lost", "wrong", "right")]
    told = [s[4]["shaping"] for s in steps]
    assert told == pytest.approx([0.5 * 0.14 / 4, None, (0.5 - 1) * 0.14 / 4, -0.14 / 4])
    assert [s[1] for s in steps] == pytest.approx([0.175 + told[0], 0.0, 0.175 + told[2], 1.0 + told[3]])
    assert told[0] + 0.5 * told[2] + 0.25 * told[3] == pytest.approx(0.0)
    single = KernelEnv(task=TASK, backend="cpu", grade=half_right, reward="fusion", max_turns=1)
    single.reset(seed=0)
    _, reward, _, truncated, info = single.step("wrong")
    assert truncated and info["shaping"] == 0.0 and reward == pytest.approx(0.175 - 0.19 + 0.14 / 4)
    with pytest.raises(UsageError, match="gamma"):
        _env(gamma=2)


def test_best_follows_the_value_of_the_preset_and_not_the_shaped_reward() -> None:
    env = KernelEnv(task=TASK, backend="cpu", grade=half_right, reward="fusion", gamma=0.5)
    assert env.reset(seed=0)[0]["best"] == env.reward.range("cpu")[0]
    steps = [env.step(source) for source in ("wrong", "lost", "wrong", "right")]
    values = [env.reward(s[4]["outcome"]) for s in steps]
    assert values == pytest.approx([0.175 - 0.19 + 0.14 / 4, None, 0.175 - 0.19 + 0.14 / 4, 1.0])
    assert [float(s[0]["best"]) for s in steps] == pytest.approx([0.02, 0.02, 0.02, 1.0])
    rewards = [s[1] for s in steps]
    assert rewards == pytest.approx([0.175 + 0.0175, 0.0, 0.175 - 0.0175, 1.0 - 0.035]), "not best, in any step"
    # With one submission, or a preset without shaping, the two are the same.
    for more in ({"reward": "fusion", "max_turns": 1}, {"reward": "default"}):
        env = KernelEnv(task=TASK, backend="cpu", grade=half_right, **more)
        env.reset(seed=0)
        seen, reward, *_ = env.step("wrong")
        assert float(seen["best"]) == pytest.approx(reward)


def test_an_infrastructure_fault_is_masked_not_punished() -> None:
    env = _env()
    env.reset(seed=0)
    _, _, terminated, _, info = env.step("lost")
    assert info["masked"] and not terminated


def test_the_seed_chooses_the_task() -> None:
    env = KernelEnv(split="all", backend="cpu", grade=fake_grade)
    first = [env.reset(seed=s)[0]["task"] for s in range(12)]
    assert first == [env.reset(seed=s)[0]["task"] for s in range(12)]
    assert env.reset(options={"task": TASK})[0]["task"] == TASK


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"task": "activation/gelu_fp61"}, "activation/gelu_fp16"),
        ({"category": "activations"}, "activation"),
        ({"split": "test"}, "train"),
        ({"task": TASK, "backend": "tpu"}, "cpu"),
        ({"task": TASK, "reward": "defualt"}, "default"),
        ({"task": TASK, "grading": "papers"}, "paper"),
        ({"task": TASK, "sizes": "heldout"}, "held-out, published"),
        ({"task": TASK, "render_mode": "human"}, "ansi"),
        ({"task": TASK, "max_turns": 0}, "at least 1"),
    ],
)
def test_bad_settings_name_what_is_accepted(settings: dict, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        KernelEnv(**{"grade": fake_grade, "backend": "cpu", **settings})


def test_unknown_reset_options_raise() -> None:
    with pytest.raises(UsageError, match="task"):
        _env().reset(options={"tsak": TASK})
    with pytest.raises(UnknownName):
        _env().reset(options={"task": "nothing"})


@pytest.mark.parametrize(
    "options",
    [
        {"targets": ("sm_99",)},
        {"wall": -1},
        {"wall": "x"},
        {"grading_seed": "abc"},
        {"max_turns": "a"},
        {"max_turns": 0},
    ],
)
def test_what_cannot_work_is_refused_when_the_env_is_made(options: dict) -> None:
    with pytest.raises(UsageError):
        _env(**options)


@pytest.mark.parametrize("task", ["", ["a"], 3])
def test_a_task_that_is_no_id_is_refused(task: object) -> None:
    with pytest.raises(UsageError):
        _env().reset(options={"task": task})


def test_a_whole_answer_is_an_action() -> None:
    env = _env()
    env.reset(options={"task": TASK})
    assert env.step("Here it is:\n```python\nright\n```\nDone.")[2]


def test_shared_memory_is_refused_where_it_would_lose_text() -> None:
    with pytest.raises(ValueError, match="shared_memory"):
        gymnasium.vector.AsyncVectorEnv([_make] * 2)


def _make() -> KernelEnv:
    return _env()


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_vector_envs(kind: str) -> None:
    if kind == "sync":
        envs = gymnasium.vector.SyncVectorEnv([_make] * 2)
    else:
        envs = gymnasium.vector.AsyncVectorEnv([_make] * 2, shared_memory=False)
    seen, _ = envs.reset(seed=3)
    assert list(seen["task"]) == [TASK, TASK]
    seen, rewards, terminated, _, _ = envs.step(("right", "wrong"))
    assert list(terminated) == [True, False] and rewards[0] > rewards[1] > 0
    assert "3x the tolerance" in seen["feedback"][1]
    envs.close()


def _children() -> set[int]:
    """Processes whose parent is this one (other tests may run beside it)."""
    mine = set()
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/stat") as f:
                if int(f.read().rsplit(")", 1)[1].split()[1]) == os.getpid():
                    mine.add(int(pid))
        except OSError:
            continue
    return mine


def test_close_leaves_no_process() -> None:
    before = _children()
    env = KernelEnv(task=TASK, backend="cpu")
    env.reset(seed=0)
    env.step("import torch\n\ndef gelu_fp16(input, approximate='none'):\n    return torch.empty_like(input)\n")
    assert _children() - before
    env.close()
    deadline = time.monotonic() + 10
    while _children() - before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _children() - before


def test_observation_is_in_its_space() -> None:
    env = _env()
    seen, _ = env.reset(seed=0)
    assert env.observation_space.contains(seen)
    seen = env.step("right")[0]
    assert env.observation_space.contains(seen) and isinstance(seen["best"], np.ndarray)


FORKED = """
import gymnasium, kbx_env, torch
torch.set_num_threads(2)
torch.randn(1 << 22).sum()  # starts the threads that a fork leaves behind
envs = gymnasium.make_vec("kbx/Kernel-v0", num_envs=1, vectorization_mode="async", task="math/softmax", backend="cpu",
                          targets=(), vector_kwargs={"shared_memory": False})
envs.reset(seed=1)
print(envs.step([kbx_env.spec.catalog.expert_source("math/softmax")])[1])
envs.close()
"""


def test_an_async_env_made_after_torch_has_run_does_not_hang() -> None:
    env = {**os.environ, "OMP_NUM_THREADS": "2"}
    done = subprocess.run([sys.executable, "-c", FORKED], capture_output=True, text=True, timeout=120, env=env)
    assert done.returncode == 0 and "[1.]" in done.stdout, done.stderr[-2000:]
