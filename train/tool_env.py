"""Kernels submitted by a tool call: TRL's ``environment_factory``. Its calls run one after another; ``mode=multi`` is faster."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kbx_env.train.judge import Judge, Judged
from kbx_env.train.rollout import episode_reward
from kbx_env.train.tally import Tally, fact


class KernelToolEnv:
    """One episode at a time; TRL makes some of these and resets them for every batch."""

    def __init__(self, judge: Judge, max_turns: int = 4) -> None:
        self._judge, self._max_turns = judge, max_turns
        self._task, self._turns = "", list[Judged]()

    def reset(self, task: str = "", **row: Any) -> None:
        """Begin an episode of a task; the other columns of its row are not needed."""
        self._task, self._turns = task, []

    def submit_kernel(self, source: str) -> str:
        """Compile, check and time a kernel.

        Args:
            source: The whole Python module that defines the task's function.

        Returns:
            The verdict, with what to do next.
        """
        if len(self._turns) >= self._max_turns:
            return "No submission is left."
        (judged,) = self._judge([(self._task, source)])
        self._turns.append(judged)
        return "Solved. Nothing more is needed." if judged.solved else judged.feedback


def tools(judge: Judge, tally: Tally, tokenizer: Any, max_turns: int, episode: str) -> dict[str, Any]:
    """What TRL's trainer is given for this mode."""

    def kernel_reward(
        environments: Sequence[KernelToolEnv], task: Sequence[str], completion_ids: Sequence[Any], trainer_state: Any,
        **columns: Any,
    ) -> list[float | None]:  # fmt: skip
        played = [list(e._turns) for e in environments]
        # Who never called the tool has handed in nothing, which is graded as such.
        silent = [i for i, turns in enumerate(played) if not turns]
        for i, judged in zip(silent, judge([(task[i], "") for i in silent]), strict=True):
            played[i].append(judged)
        rewards = [episode_reward(turns, episode, max_turns > 1) for turns in played]
        facts = [fact(t, turns, r) for t, turns, r in zip(task, played, rewards, strict=True)]
        texts = [str(tokenizer.decode(list(ids))) for ids in completion_ids]
        tally.add(facts, texts, trainer_state.global_step + 1)
        return rewards

    return {"reward_funcs": [kernel_reward], "environment_factory": lambda: KernelToolEnv(judge, max_turns)}
