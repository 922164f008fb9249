"""Episodes in which the model submits kernels by a tool call (TRL's ``environment_factory``).

TRL runs the calls one after another; ``mode=multi`` grades all answers of a turn at once and is faster.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kbx_env.train.batch_grader import BatchGrader, GradedAnswer
from kbx_env.train.rollout import episode_reward
from kbx_env.train.step_metrics import StepMetrics, episode_stats


class KernelToolEnv:
    """Plays one episode at a time; TRL makes several of these and resets them for every batch."""

    def __init__(self, grader: BatchGrader, max_turns: int = 4) -> None:
        """An environment without an episode.

        Args:
            grader: grades the submissions.
            max_turns: submissions of an episode.
        """
        self._grader, self._max_turns = grader, max_turns
        self._task, self._turns = "", list[GradedAnswer]()

    def reset(self, task: str = "", **row: Any) -> None:
        """Start an episode.

        Args:
            task: the task's id.
            **row: the other columns of the row of data, which are not used.
        """
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
        (graded,) = self._grader([(self._task, source)])
        self._turns.append(graded)
        return "Solved. Nothing more is needed." if graded.solved else graded.feedback


def tools(grader: BatchGrader, metrics: StepMetrics, tokenizer: Any, max_turns: int, episode: str) -> dict[str, Any]:
    """Return the arguments of TRL's trainer for this mode.

    Args:
        grader: grades the submissions.
        metrics: records the episodes.
        tokenizer: decodes answers.
        max_turns: submissions of an episode.
        episode: which submission counts, ``best`` or ``last``.

    Returns:
        Keyword arguments.
    """

    def kernel_reward(
        environments: Sequence[KernelToolEnv], task: Sequence[str], completion_ids: Sequence[Any], trainer_state: Any,
        **columns: Any,
    ) -> list[float | None]:  # fmt: skip
        played = [list(e._turns) for e in environments]
        # An episode without a tool call counts as one empty submission.
        silent = [i for i, turns in enumerate(played) if not turns]
        for i, graded in zip(silent, grader([(task[i], "") for i in silent]), strict=True):
            played[i].append(graded)
        rewards = [episode_reward(turns, episode, max_turns > 1) for turns in played]
        episodes = [episode_stats(t, turns, r) for t, turns, r in zip(task, played, rewards, strict=True)]
        texts = [str(tokenizer.decode(list(ids))) for ids in completion_ids]
        metrics.add(episodes, texts, trainer_state.global_step + 1)
        return rewards

    return {"reward_funcs": [kernel_reward], "environment_factory": lambda: KernelToolEnv(grader, max_turns)}
