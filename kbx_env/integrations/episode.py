"""One episode for frameworks with an interface of their own: a prompt, then submissions with reward and feedback."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kbx_env.baselines.llm.conversation import follow_up
from kbx_env.envs.prompt import instruction
from kbx_env.errors import UsageError
from kbx_env.rewards.shaping import Shaping
from kbx_env.spec.catalog import load_task, load_tasks
from kbx_env.train.batch_grader import GradedAnswer
from kbx_env.train.warm_grader import WarmGrader


@dataclass(frozen=True)
class Submission:
    """One graded submission of an episode."""

    reward: float | None
    """As ``KernelEnv.step`` returns it; ``None`` where the grading is masked."""
    feedback: str
    """The next message to the model: verdict and request for a correction; only the verdict when the episode is over."""
    done: bool
    solved: bool
    graded: GradedAnswer

    @property
    def verdict(self) -> str:
        """The verdict."""
        return str(self.graded.outcome.verdict)

    @property
    def masked(self) -> bool:
        """Whether the grading has no reward: the machine failed, not the submission."""
        return self.reward is None

    def facts(self) -> dict[str, Any]:
        """Return plain JSON about the submission: verdict, masked, solved, speedup and terms."""
        return {
            "verdict": self.verdict, "masked": self.masked, "solved": self.solved, "speedup": self.graded.outcome.speedup,
            "terms": dict(self.graded.terms),
        }  # fmt: skip


@dataclass
class KernelEpisode:
    """An episode of one task. The rewards are those of ``KernelEnv`` with as many turns.

    Args:
        grader: grades the submissions.
        task: the task's id.
        max_turns: most submissions.
    """

    grader: WarmGrader
    task: str
    max_turns: int = 4
    submissions: list[Submission] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Check the arguments."""
        load_task(self.task)
        if self.max_turns < 1:
            raise UsageError(f"max_turns is {self.max_turns}; at least 1")
        self._shaping = Shaping()

    @property
    def done(self) -> bool:
        """Whether the episode is over."""
        return bool(self.submissions) and self.submissions[-1].done

    def prompt(self) -> str:
        """Return the instruction. Starts the grader, which knows whether kernels are timed."""
        return instruction(load_task(self.task), self.grader.start().backend)

    def step(self, answer: str) -> Submission:
        """Grade a submission.

        Args:
            answer: a source, or an answer with a fenced block.

        Returns:
            The graded submission.

        Raises:
            UsageError: the episode is over.
        """
        self._check()
        return self._add(self.grader.grade([(self.task, answer)]))

    async def astep(self, answer: str) -> Submission:
        """Grade a submission without blocking the event loop; see ``step``.

        Args:
            answer: a source, or an answer with a fenced block.

        Returns:
            The graded submission.
        """
        self._check()
        return self._add(await self.grader.agrade([(self.task, answer)]))

    def _check(self) -> None:
        if self.done:
            raise UsageError("the episode is over; begin another one")

    def _add(self, graded: Sequence[GradedAnswer]) -> Submission:
        (answer,) = graded
        done = answer.solved or len(self.submissions) + 1 >= self.max_turns
        shaping = self._shaping.step(answer.potential, done)
        reward = answer.reward
        if self.max_turns > 1 and answer.base is not None:
            reward = answer.base + (shaping or 0.0)
        feedback = answer.feedback if done else follow_up(answer.feedback)
        self.submissions.append(Submission(reward, feedback, done, answer.solved, answer))
        return self.submissions[-1]


def chosen_tasks(split: str = "train", category: str | None = None, tasks: str = "*") -> list[str]:
    """Return ids of tasks.

    Args:
        split: ``train``, ``eval`` or ``all``.
        category: category of the tasks; ``None`` for all.
        tasks: globs over ids or names, comma-separated.

    Returns:
        At least one id, sorted.
    """
    return [t.id for t in load_tasks(category=category, split=split, pattern=tasks)]
