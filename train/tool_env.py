"""Episodes in which the model submits kernels by a tool call (TRL's ``environment_factory``), with the metrics of a run.

TRL runs the calls one after another; ``mode=multi`` grades all answers of a turn at once and is faster.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kbx_env.train.batch_grader import BatchGrader
from kbx_env.train.step_metrics import StepMetrics, episode_stats

from kbx_env.trl import KernelTools


class KernelToolEnv(KernelTools):
    """``KernelTools`` that the run's own reward function pays, which also records the episodes."""

    get_reward = None  # type: ignore[assignment]  # TRL would add it to the reward function's reward


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
        # An episode without a tool call counts as one empty submission: all of them are graded in parallel.
        silent = [e for e in environments if not e._turns]
        for e, graded in zip(silent, grader([(e._task, "") for e in silent]), strict=True):
            e._turns.append(graded)
        rewards = [KernelTools.get_reward(e) for e in environments]
        episodes = [episode_stats(t, e._turns, r) for t, e, r in zip(task, environments, rewards, strict=True)]
        texts = [str(tokenizer.decode(list(ids))) for ids in completion_ids]
        metrics.add(episodes, texts, trainer_state.global_step + 1)
        return rewards

    return {
        "reward_funcs": [kernel_reward], "environment_factory": lambda: KernelToolEnv(grader, max_turns, episode)
    }  # fmt: skip
