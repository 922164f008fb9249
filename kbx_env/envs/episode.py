"""An episode of an episodic policy: one task, many submissions, and the record of them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kbx_env.envs import prompt
from kbx_env.grading.runtime.policy_script import ScriptResult, run_script
from kbx_env.outcome import Outcome
from kbx_env.spec.task import Task

Submit = Callable[[Sequence[str]], list[Outcome]]
"""Grades sources, at the same time where it can, and returns the outcomes in their order."""


@dataclass(frozen=True)
class Turn:
    """One graded submission of an episode.

    Attributes:
        label: the policy's own name for it, such as ``round 1, slot 0``.
        round: the policy's round, from 0.
        sha: SHA-256 of the source in hexadecimal.
        verdict: the outcome's verdict.
        compiled: whether the term ``compiles`` is 1.
        correct: whether it passed all cases.
        speedup: over eager; ``None`` where it was not timed.
        reward: ``None`` where the grading is masked.
    """

    label: str
    round: int
    sha: str
    verdict: str
    compiled: bool
    correct: bool
    speedup: float | None
    reward: float | None

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain JSON types."""
        return dict(vars(self))


@dataclass(frozen=True)
class Trajectory:
    """The result of an episodic policy: its final source, or the reason why there is none, and all its submissions."""

    source: str | None
    reason: str = ""
    turns: tuple[Turn, ...] = ()
    notes: Mapping[str, Any] = field(default_factory=dict)
    """Further facts about the episode from the method, plain JSON."""


class Episode:
    """The interface of a task for an episodic policy, which may submit sources and run its own scripts.

    Verdicts reveal no hidden input, but they are an oracle: a report shows how many gradings each policy used.
    """

    def __init__(
        self, task: Task, backend: str, submit: Submit, *, sample: int = 0,
        reward: Callable[[Outcome], float | None] | None = None,
    ) -> None:  # fmt: skip
        """Begin an episode.

        Args:
            task: the task to solve.
            backend: ``cpu`` or ``cuda``.
            submit: grades sources.
            sample: number of this one of several independent answers, from 0.
            reward: returns an outcome's reward, ``None`` where it is masked; by default the preset ``default``.
        """
        if reward is None:
            from kbx_env.rewards.compose import load_preset

            reward = load_preset("default")
        self.task, self.backend, self.sample = task, backend, sample
        self.prompt = prompt.instruction(task, backend)
        self.turns: list[Turn] = []
        self.scripts = 0
        """Number of scripts that the policy has run."""
        self._submit, self._reward = submit, reward

    @property
    def observation(self) -> dict[str, Any]:
        """The argument of ``Policy.act`` at the beginning of the episode."""
        return {
            "task": self.task.id, "prompt": self.prompt, "feedback": "", "turn": len(self.turns), "sample": self.sample
        }  # fmt: skip

    def grade(self, sources: Sequence[str], *, round: int, labels: Sequence[str] | None = None) -> list[Outcome]:
        """Grade sources, and record them as turns.

        Args:
            sources: submissions, each a whole module.
            round: the policy's round, from 0.
            labels: a name for each, for the record; by default round and position.

        Returns:
            The outcomes, in the order of the sources.
        """
        from kbx_env.rewards.compose import load_term

        compiles = load_term("compiles")
        outcomes = self._submit(sources)
        for index, (source, outcome) in enumerate(zip(sources, outcomes, strict=True)):
            label = labels[index] if labels else f"round {round}, source {index}"
            sha = hashlib.sha256(source.encode("utf-8", "surrogatepass")).hexdigest()
            self.turns.append(
                Turn(label, round, sha, str(outcome.verdict), compiles(outcome) == 1.0, outcome.correct,
                     outcome.speedup, self._reward(outcome))
            )  # fmt: skip
        return outcomes

    @staticmethod
    def feedback(outcome: Outcome) -> str:
        """Return the verdict as text of bounded length, the same as ``KernelEnv`` shows."""
        return prompt.feedback(outcome)

    def run_script(self, files: Mapping[str, str], entry: str, wall: float = 30.0) -> ScriptResult:
        """Run a script that the policy wrote, such as a test, in the sandbox and apart from the grader.

        Args:
            files: text by name; the files are put into a private folder.
            entry: name of the file that Python runs.
            wall: seconds after which it is ended.

        Returns:
            Its exit status and output.
        """
        self.scripts += 1
        return run_script(files, entry, backend=self.backend, wall=wall)
