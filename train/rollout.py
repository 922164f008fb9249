"""Episodes of several turns for GRPO: the model answers, all answers of a turn are graded at once, verdicts are shown, again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kbx_env.baselines.llm.conversation import Conversation
from kbx_env.rewards.shaping import shaped
from kbx_env.train.judge import Judge, Judged
from kbx_env.train.tally import Tally, fact

REWARD = "episode_reward"
EPISODES = ("best", "last")
_LEAST = 16
"""Tokens that must be left for an answer, or feedback is not shown any more."""
Generate = Callable[[Any, list[list[int]], int], tuple[list[list[int]], list[list[float]] | None]]


def episode_reward(turns: Sequence[Judged], episode: str = "best", several: bool = True) -> float | None:
    """The one number of an episode; ``None`` where every turn is masked.

    Potential-based shaping adds up to 0 over an episode, whatever was submitted: the sum needs none of it, and only credit for
    each turn (``turn_returns``) does. An episode that may have one turn only is paid the preset's own reward.

    Args:
        turns: its submissions, in order.
        episode: ``best``: of the best unmasked submission, or ``last``: of the last one.
        several: whether it may have more turns than one.
    """
    values = [v for j in turns if (v := j.base if several else j.reward) is not None]
    if not values:
        return None
    return max(values) if episode == "best" else values[-1]


def turn_returns(turns: Sequence[Judged], gamma: float, several: bool = True) -> list[float | None]:
    """For every turn the discounted sum of rewards from it on, shaping included (Kevin: arXiv 2507.11948).

    A masked turn has none, and is no step: what comes after it is not discounted for it.
    """
    shaping = shaped([j.potential for j in turns], gamma)
    rewards = [
        None if j.base is None else (j.base + (f or 0.0) if several else j.reward) for j, f in zip(turns, shaping, strict=True)
    ]
    found: list[float | None] = []
    after = 0.0
    for reward in reversed(rewards):
        if reward is None:
            found.append(None)
        else:
            after = reward + gamma * after
            found.append(after)
    return found[::-1]


@dataclass
class _Row:
    """One episode: ``ids`` after the prompt, ``mask`` 1 on what the model said, ``room`` for all of them; ``begun`` of every
    answer by the template."""

    task: str
    question: str
    begun: str
    prompt: list[int]
    room: int
    ids: list[int] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    turns: list[Judged] = field(default_factory=list)
    spans: list[tuple[int, int]] = field(default_factory=list)
    over: bool = False

    @property
    def left(self) -> int:
        return self.room - len(self.ids)

    def add(self, ids: Sequence[int], said: int, logprobs: Sequence[float] | None = None) -> None:
        self.ids += ids
        self.mask += [said] * len(ids)
        self.logprobs += logprobs if logprobs is not None else [0.0] * len(ids)


@dataclass
class Rollout:
    """What TRL calls as ``rollout_func``: prompts in, already repeated; tokens, masks and rewards out.

    An episode ends when it is solved, after ``max_turns``, with an answer that was cut off, or when feedback and another answer
    no longer fit into ``length`` tokens (of all turns together) or into the model's ``context``. ``each``: tokens of one answer
    at most; ``None``: whatever is left, so that a first answer may take what all turns have.
    """

    judge: Judge
    tally: Tally
    conversation: Conversation
    generate: Generate
    max_turns: int
    length: int
    context: int | None = None
    episode: str = "best"
    gamma: float = 1.0
    each: int | None = None

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        """Play one episode for each prompt."""
        from kbx_env.train.grpo_trainer import SPANS

        rows, told = [], False
        for messages in prompts:
            ids = self.conversation.opening(messages)
            room = self.length if self.context is None else min(self.length, self.context - len(ids))
            begun = self.conversation.begun(messages)
            rows.append(_Row(messages[-1]["task"], messages[-1]["content"], begun, ids, max(1, room)))
        for turn in range(self.max_turns):
            live = [r for r in rows if not r.over]
            if not _anywhere(trainer, bool(live)):
                break
            told = self._turn(live, rows, trainer, last=turn + 1 == self.max_turns) or told
        several = self.max_turns > 1
        rewards = [episode_reward(r.turns, self.episode, several) for r in rows]
        facts = [fact(r.task, r.turns, reward) for r, reward in zip(rows, rewards, strict=True)]
        texts = [r.begun + trainer.processing_class.decode(r.ids) for r in rows]
        self.tally.add(facts, texts, trainer.state.global_step + 1)
        returns = [turn_returns(r.turns, self.gamma, several) for r in rows]
        return {
            "prompt_ids": [r.prompt for r in rows], "completion_ids": [r.ids for r in rows],
            "logprobs": [r.logprobs for r in rows] if told else None, "env_mask": [r.mask for r in rows], REWARD: rewards,
            SPANS: [[(*span, x) for span, x in zip(r.spans, xs, strict=True)] for r, xs in zip(rows, returns, strict=True)],
        }  # fmt: skip

    def _turn(self, live: list[_Row], rows: list[_Row], trainer: Any, *, last: bool) -> bool:
        """One turn of all live episodes; whether the generator told log-probabilities."""
        if not live:  # generating is a joint act of all processes where weights are spread over them
            return self.generate(trainer, [rows[0].prompt], 1)[1] is not None
        most = [r.left if self.each is None else min(r.left, self.each) for r in live]
        answers, logprobs = self.generate(trainer, [r.prompt + r.ids for r in live], max(most))
        asked = []
        for i, (row, ids) in enumerate(zip(live, answers, strict=True)):
            kept = list(ids[: most[i]]) or [min(self.conversation.ends)]
            start = len(row.ids)
            row.add(kept, 1, None if logprobs is None else list(logprobs[i])[: len(kept)])
            row.spans.append((start, len(row.ids)))
            asked.append((row.task, row.begun + self.conversation.decode(kept)))
        for row, judged in zip(live, self.judge(asked), strict=True):
            row.turns.append(judged)
            if judged.solved or last or row.ids[-1] not in self.conversation.ends:
                row.over = True
                continue
            shown = self.conversation.follow_up(judged.feedback, row.question)
            if len(shown) + _LEAST > row.left:
                row.over = True
            else:
                row.add(shown, 0)
        return logprobs is not None


def _anywhere(trainer: Any, live: bool) -> bool:
    if trainer.accelerator.num_processes == 1:
        return live
    from accelerate.utils import gather_object

    return any(gather_object([live]))


def paid(prompts: Sequence[Any], completions: Sequence[Any], **columns: Any) -> list[float | None]:
    """The reward function of a rollout: what its episodes were given."""
    return list(columns[REWARD])
