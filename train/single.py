"""GRPO on one answer to each prompt: TRL's plain interface, a reward function that is handed a whole batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from kbx_env.baselines.llm.conversation import Conversation
from kbx_env.train.judge import Judge
from kbx_env.train.tally import Tally, fact


def reward_of(judge: Judge, tally: Tally, tokenizer: Any) -> Callable[..., list[float | None]]:
    """The reward function: grades the batch in one call; ``None`` is masked by TRL, since it is the only function."""

    conversation = Conversation(tokenizer)

    def kernel_reward(
        prompts: Sequence[Any], completions: Sequence[Any], completion_ids: Sequence[Any], task: Sequence[str],
        trainer_state: Any, log_extra: Any = None, **columns: Any,
    ) -> list[float | None]:  # fmt: skip
        # From the tokens: some tokenizers parse an answer into parts, the report's policy does not.
        texts = [conversation.begun(p) + conversation.decode(ids) for p, ids in zip(prompts, completion_ids, strict=True)]
        judged = judge(list(zip(task, texts, strict=True)))
        facts = [fact(t, [j], j.reward) for t, j in zip(task, judged, strict=True)]
        tally.add(facts, texts, trainer_state.global_step + 1)
        if log_extra is not None:
            log_extra("task", list(task))
            log_extra("verdict", [f.verdict for f in facts])
        return [j.reward for j in judged]

    return kernel_reward
