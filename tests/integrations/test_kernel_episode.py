"""One episode for all adapters: it pays what ``KernelEnv`` pays."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from kbx_env.train.warm_grader import WarmGrader, shared
from service_stand_in import by_word

from kbx_env.envs.kernel_env import KernelEnv
from kbx_env.errors import UnknownName, UsageError
from kbx_env.integrations.episode import KernelEpisode, chosen_tasks

TASK = "random/logspace"


@pytest.mark.parametrize("preset", ["default", "beginner"])
@pytest.mark.parametrize("answers, turns", [(["BAD", "GOOD"], 4), (["BAD", "BAD"], 2), (["LOST", "BAD"], 2), (["BAD"], 1)])
def test_it_pays_what_kernel_env_pays(preset: str, answers: list[str], turns: int) -> None:
    env = KernelEnv(task=TASK, backend="cpu", reward=preset, max_turns=turns, grade=by_word)
    env.reset()
    with WarmGrader(preset, "cpu", workers=1, grade=by_word) as grader:
        episode = KernelEpisode(grader, TASK, turns)
        assert episode.prompt() == env.reset()[0]["prompt"]
        for n, answer in enumerate(answers):
            assert not episode.done
            seen, reward, ended, cut, info = env.step(answer)
            step = asyncio.run(episode.astep(answer)) if n else episode.step(answer)
            assert (step.reward or 0.0, step.masked, step.done) == (reward, info["masked"], ended or cut)
            assert seen["feedback"] in step.feedback and step.facts()["terms"] == info["terms"]
        assert episode.done
        with pytest.raises(UsageError, match="is over"):
            episode.step("GOOD")


def test_what_is_refused(grader: Any) -> None:
    with pytest.raises(UnknownName, match="unknown task"):
        KernelEpisode(grader, "math/sofmax")
    with pytest.raises(UsageError, match="at least 1"):
        KernelEpisode(grader, TASK, 0)
    assert TASK in chosen_tasks("all", "random") and chosen_tasks(tasks="logspace") == [TASK]


def test_equal_options_share_a_grader() -> None:
    assert shared("default", "cpu", targets=["sm_90"]) is shared("default", "cpu", targets=["sm_90"])
    assert shared("default", "cpu") is not shared("beginner", "cpu")


def test_a_cancelled_step_does_not_take_the_outcome_from_another(grader: Any) -> None:
    async def both() -> Any:
        one, other = (asyncio.create_task(grader.agrade([(TASK, "GOOD")])) for _ in range(2))
        await asyncio.sleep(0)
        one.cancel()
        return await other

    (graded,) = asyncio.run(both())
    assert graded.reward == 1.0
