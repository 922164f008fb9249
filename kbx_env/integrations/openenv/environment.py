"""The environment of the server: one object for each session; all share one grader."""

from __future__ import annotations

import random
import uuid
from typing import Any

from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import EnvironmentMetadata

import kbx_env
from kbx_env.errors import UsageError
from kbx_env.integrations.episode import KernelEpisode, Submission, chosen_tasks
from kbx_env.integrations.openenv.models import KernelAction, KernelObservation, KernelState
from kbx_env.train.warm_grader import WarmGrader


class KernelEnvironment(Environment[KernelAction, KernelObservation, KernelState]):
    """An agent writes a kernel for a task, reads the verdict and tries again."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self, grader: WarmGrader, split: str = "train", category: str | None = None, max_turns: int = 4) -> None:
        """An environment without an episode.

        Args:
            grader: grades the submissions of all sessions.
            split: ``train``, ``eval`` or ``all`` tasks.
            category: category of the tasks; ``None`` for all.
            max_turns: submissions of an episode.
        """
        super().__init__()
        self._grader, self._tasks, self._max_turns = grader, chosen_tasks(split, category), max_turns
        self._id, self._episode = "", KernelEpisode(grader, self._tasks[0], max_turns)
        self._random = random.Random()
        self._begun = False

    def reset(
        self, seed: int | None = None, episode_id: str | None = None, task: str | None = None, **more: Any
    ) -> KernelObservation:  # fmt: skip
        """Begin an episode.

        Args:
            seed: of the choice of the task; ``None``: random.
            episode_id: a name for the episode; by default a random one.
            task: the task; by default one of the selected tasks.
            **more: refused.

        Returns:
            The task and its prompt.

        Raises:
            UsageError: an unknown argument.
        """
        if more:
            raise UsageError(f"reset has no argument {sorted(more)[0]!r}; accepted: seed, episode_id, task")
        if seed is not None:
            self._random.seed(seed)
        self._episode = KernelEpisode(self._grader, task or self._random.choice(self._tasks), self._max_turns)
        self._id, self._begun = episode_id or str(uuid.uuid4()), True
        return KernelObservation(task=self._episode.task, prompt=self._episode.prompt())

    def step(self, action: KernelAction, timeout_s: float | None = None, **more: Any) -> KernelObservation:
        """Grade a submission.

        Args:
            action: the submission.
            timeout_s: not used: gradings have limits of their own.
            **more: not used.

        Returns:
            Verdict, feedback and reward.

        Raises:
            UsageError: no episode has begun, or it is over.
        """
        self._check()
        return self._observed(self._episode.step(action.source))

    async def step_async(self, action: KernelAction, timeout_s: float | None = None, **more: Any) -> KernelObservation:
        """Grade a submission without blocking other sessions; see ``step``.

        Args:
            action: the submission.
            timeout_s: not used.
            **more: not used.

        Returns:
            Verdict, feedback and reward.
        """
        self._check()
        return self._observed(await self._episode.astep(action.source))

    def _check(self) -> None:
        if not self._begun:
            raise UsageError("step before reset")

    def _observed(self, last: Submission) -> KernelObservation:
        e = self._episode
        return KernelObservation(
            task=e.task, prompt=e.prompt(), feedback=last.feedback, verdict=last.verdict, turn=len(e.submissions),
            masked=last.masked, solved=last.solved, terms=dict(last.graded.terms), reward=last.reward, done=last.done,
        )  # fmt: skip

    @property
    def state(self) -> KernelState:
        """The state of the episode."""
        e = self._episode
        return KernelState(
            episode_id=self._id or None, step_count=len(e.submissions), task=e.task if self._begun else "", max_turns=e.max_turns,
            done=e.done,
        )  # fmt: skip

    def get_metadata(self) -> EnvironmentMetadata:
        """Return name, description and version."""
        return EnvironmentMetadata(
            name="kbx_env", description="Write a Triton GPU kernel; it is checked, and timed where there is a GPU.",
            version=kbx_env.__version__,
        )  # fmt: skip
