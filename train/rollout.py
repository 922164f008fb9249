"""Episodes of several turns for GRPO: the model answers, all answers of a turn are graded at once, feedback is shown, repeat."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kbx_env.baselines.llm.conversation import Conversation
from kbx_env.rewards.shaping import shaped
from kbx_env.train.answer_watch import AnswerWatch
from kbx_env.train.batch_grader import BatchGrader, GradedAnswer
from kbx_env.train.step_metrics import StepMetrics, episode_stats

REWARD = "episode_reward"
"""The column of a rollout with the reward of each episode."""
EPISODES = ("best", "last")
"""Which submission of an episode counts."""
_LEAST = 16
"""Tokens that must be left for an answer; with fewer the episode ends and feedback is not shown."""
Generate = Callable[[Any, list[list[int]], int], tuple[list[list[int]], list[list[float]] | None]]
"""From trainer, prompts in tokens and the longest answer to answers in tokens and, if known, their log-probabilities."""


def episode_reward(turns: Sequence[GradedAnswer], episode: str = "best", several: bool = True) -> float | None:
    """Return the reward of an episode.

    Potential-based shaping adds up to 0 over an episode, so the episode's reward leaves it out; ``turn_returns`` has it. An
    episode that may have only one turn gets the preset's own reward.

    Args:
        turns: the submissions of the episode, in order.
        episode: ``best``: the reward of the best unmasked submission, or ``last``: of the last one.
        several: whether the episode may have more than one turn.

    Returns:
        The reward; ``None`` where every turn is masked.
    """
    values = [v for j in turns if (v := j.base if several else j.reward) is not None]
    if not values:
        return None
    return max(values) if episode == "best" else values[-1]


def turn_returns(turns: Sequence[GradedAnswer], gamma: float, several: bool = True) -> list[float | None]:
    """Return the discounted sum of rewards from each turn on, with shaping (as in Kevin, arXiv 2507.11948).

    Args:
        turns: the submissions of the episode, in order.
        gamma: discount between turns.
        several: whether the episode may have more than one turn.

    Returns:
        One return for each turn; ``None`` for a masked turn, which does not count as a step of discounting.
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
class _EpisodeState:
    """One episode in progress.

    ``ids`` are the tokens after the prompt, at most ``room``; ``mask`` is 1 on those that the model generated. ``begun`` is the
    beginning of reasoning that the chat template writes before each answer, or "".
    """

    task: str
    question: str
    begun: str
    prompt: list[int]
    room: int
    ids: list[int] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    turns: list[GradedAnswer] = field(default_factory=list)
    spans: list[tuple[int, int]] = field(default_factory=list)
    over: bool = False

    @property
    def left(self) -> int:
        return self.room - len(self.ids)

    def add(self, ids: Sequence[int], generated: int, logprobs: Sequence[float] | None = None) -> None:
        self.ids += ids
        self.mask += [generated] * len(ids)
        self.logprobs += logprobs if logprobs is not None else [0.0] * len(ids)


@dataclass
class Rollout:
    """Plays episodes as TRL's ``rollout_func``: takes prompts, already repeated, and returns tokens, masks and rewards.

    An episode ends when it is solved, after ``max_turns``, with an answer that was cut off, or when feedback and another answer
    no longer fit.
    """

    grader: BatchGrader
    metrics: StepMetrics
    conversation: Conversation
    generate: Generate
    max_turns: int
    length: int
    """Tokens of all turns together, feedback included."""
    context: int | None = None
    """Tokens that the model takes, prompt included; ``None``: no limit is known."""
    episode: str = "best"
    """Which submission counts, one of ``EPISODES``."""
    gamma: float = 1.0
    """Discount between turns."""
    each: int | None = None
    """Longest answer of one turn, in tokens; ``None``: all that is left, so that a first answer may use up every turn's share."""
    watch: AnswerWatch | None = None
    """Begins to grade answers while others are generated; ``None``: gradings begin when all answers of a turn have ended."""

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        """Play one episode for each prompt.

        Args:
            prompts: lists of messages; the last message has a key ``task`` with the task's id.
            trainer: TRL's trainer, passed on to ``generate``.

        Returns:
            Columns for TRL, one entry for each episode: ``prompt_ids``, ``completion_ids``, ``logprobs``, ``env_mask``,
            ``REWARD`` and ``SPANS``.
        """
        from kbx_env.train.grpo_trainer import SPANS

        rows, has_logprobs = [], False
        for messages in prompts:
            ids = self.conversation.opening(messages)
            room = self.length if self.context is None else min(self.length, self.context - len(ids))
            question, begun = messages[-1]["content"], self.conversation.reasoning(messages)
            rows.append(_EpisodeState(messages[-1]["task"], question, begun, ids, max(1, room)))
        for turn in range(self.max_turns):
            live = [r for r in rows if not r.over]
            if not _anywhere(trainer, bool(live)):
                break
            has_logprobs = self._turn(live, trainer, last=turn + 1 == self.max_turns) or has_logprobs
        several = self.max_turns > 1
        rewards = [episode_reward(r.turns, self.episode, several) for r in rows]
        episodes = [episode_stats(r.task, r.turns, reward) for r, reward in zip(rows, rewards, strict=True)]
        texts = [trainer.processing_class.decode(r.ids) for r in rows]
        self.metrics.add(episodes, texts, trainer.state.global_step + 1)
        returns = [turn_returns(r.turns, self.gamma, several) for r in rows]
        return {
            "prompt_ids": [r.prompt for r in rows], "completion_ids": [r.ids for r in rows],
            "logprobs": [r.logprobs for r in rows] if has_logprobs else None, "env_mask": [r.mask for r in rows], REWARD: rewards,
            SPANS: [[(*span, x) for span, x in zip(r.spans, xs, strict=True)] for r, xs in zip(rows, returns, strict=True)],
        }  # fmt: skip

    def _turn(self, live: list[_EpisodeState], trainer: Any, *, last: bool) -> bool:
        """Play one turn of all live episodes; return whether the generator reported log-probabilities."""
        most = [r.left if self.each is None else min(r.left, self.each) for r in live]
        # Also without live episodes: other processes have some, and all of them must take part in generating.
        prompts = [r.prompt + r.ids for r in live]
        if self.watch is not None:
            self.watch.expect(zip(prompts, [r.task for r in live], [r.begun for r in live], strict=True))
        answers, logprobs = self.generate(trainer, prompts, max(most, default=1))
        submissions = []
        for i, (row, ids) in enumerate(zip(live, answers, strict=True)):
            kept = list(ids[: most[i]]) or [min(self.conversation.ends)]
            start = len(row.ids)
            row.add(kept, 1, None if logprobs is None else list(logprobs[i])[: len(kept)])
            row.spans.append((start, len(row.ids)))
            submissions.append((row.task, row.begun + self.conversation.decode(kept)))
        for row, graded in zip(live, self.grader(submissions), strict=True):
            row.turns.append(graded)
            if graded.solved or last or row.ids[-1] not in self.conversation.ends:
                row.over = True
                continue
            shown = self.conversation.follow_up(graded.feedback, row.question)
            if len(shown) + _LEAST > row.left:
                row.over = True
            else:
                row.add(shown, 0)
        return logprobs is not None


def _anywhere(trainer: Any, live: bool) -> bool:
    """Return whether any process has live episodes."""
    if trainer.accelerator.num_processes == 1:
        return live
    from accelerate.utils import gather_object

    return any(gather_object([live]))


def paid(prompts: Sequence[Any], completions: Sequence[Any], **columns: Any) -> list[float | None]:
    """Return the rewards that the rollout has put into its column ``REWARD``: TRL's reward function of this mode."""
    return list(columns[REWARD])
