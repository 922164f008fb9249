"""The reward function of GRPO on one answer to each prompt; TRL calls it with a whole batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from kbx_env.baselines.llm.conversation import Conversation
from kbx_env.train.batch_grader import BatchGrader
from kbx_env.train.step_metrics import StepMetrics, episode_stats


def reward_of(grader: BatchGrader, metrics: StepMetrics, conversation: Conversation) -> Callable[..., list[float | None]]:
    """Return the reward function of a run.

    Args:
        grader: grades the answers of a batch in one call.
        metrics: records the episodes.
        conversation: decodes answers.

    Returns:
        A reward function for TRL. TRL masks answers whose reward is ``None``, since there is no other reward function.
    """

    def kernel_reward(
        prompts: Sequence[Any], completions: Sequence[Any], completion_ids: Sequence[Any], task: Sequence[str],
        trainer_state: Any, log_extra: Any = None, **columns: Any,
    ) -> list[float | None]:  # fmt: skip
        # Decoded here: some tokenizers parse an answer into parts, and eval/report.py grades the plain text.
        texts = [conversation.reasoning(p) + conversation.decode(ids) for p, ids in zip(prompts, completion_ids, strict=True)]
        graded = grader(list(zip(task, texts, strict=True)))
        episodes = [episode_stats(t, [j], j.reward) for t, j in zip(task, graded, strict=True)]
        metrics.add(episodes, texts, trainer_state.global_step + 1)
        if log_extra is not None:
            log_extra("task", list(task))
            log_extra("verdict", [f.verdict for f in episodes])
        return [j.reward for j in graded]

    return kernel_reward
