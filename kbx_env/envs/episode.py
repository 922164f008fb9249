"""One task, many submissions: what an episodic policy drives, and the record of what it did."""

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
"""Grades sources, all at once if it can, and returns the outcomes in their order."""


@dataclass(frozen=True)
class Turn:
    """One graded submission of an episode.

    ``label`` is the policy's own name for the moment, such as ``round 1, slot 0``; ``round`` counts from 0; ``sha`` is the
    SHA-256 of the source; ``reward`` is ``None`` where the grading is masked.
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
        """Plain JSON types."""
        return dict(vars(self))


@dataclass(frozen=True)
class Trajectory:
    """What an episodic policy hands in: its final source, or why there is none, and the submissions on the way."""

    source: str | None
    reason: str = ""
    turns: tuple[Turn, ...] = ()
    notes: Mapping[str, Any] = field(default_factory=dict)
    """What the method wants to be known of this episode, plain JSON."""


class Episode:
    """A task as an episodic policy meets it: it may submit sources and, if it needs to, run scripts of its own.

    A verdict tells no hidden input, but it is an oracle: a report shows how many gradings each policy used.
    """

    def __init__(
        self, task: Task, backend: str, submit: Submit, *, sample: int = 0, reward: Callable[[Outcome], float | None] | None = None
    ) -> None:
        """An episode.

        Args:
            task: what is to be solved.
            backend: ``cpu`` or ``cuda``.
            submit: grades sources in order.
            sample: which of several independent answers this is.
            reward: from an outcome to a number, ``None`` where it is masked; the default preset if not given.
        """
        if reward is None:
            from kbx_env.rewards.compose import load_preset

            reward = load_preset("default")
        self.task, self.backend, self.sample = task, backend, sample
        self.prompt = prompt.instruction(task, backend)
        self.turns: list[Turn] = []
        self.scripts = 0
        """Scripts of its own that the policy has run."""
        self._submit, self._reward = submit, reward

    @property
    def observation(self) -> dict[str, Any]:
        """What ``Policy.act`` is shown at the beginning."""
        return {"task": self.task.id, "prompt": self.prompt, "feedback": "", "turn": len(self.turns), "sample": self.sample}

    def grade(self, sources: Sequence[str], *, round: int, labels: Sequence[str] | None = None) -> list[Outcome]:
        """Grade some sources at once; the outcomes in their order.

        Args:
            sources: submissions, each a whole module.
            round: the policy's round, counted from 0.
            labels: a name for each, for the record.
        """
        from kbx_env.rewards.compose import load_term

        compiles = load_term("compiles")
        outcomes = self._submit(sources)
        for index, (source, outcome) in enumerate(zip(sources, outcomes, strict=True)):
            label = labels[index] if labels else f"round {round}, source {index}"
            sha = hashlib.sha256(source.encode("utf-8", "surrogatepass")).hexdigest()
            self.turns.append(
                Turn(label, round, sha, str(outcome.verdict), compiles(outcome) == 1.0, outcome.correct, outcome.speedup,
                     self._reward(outcome))
            )  # fmt: skip
        return outcomes

    @staticmethod
    def feedback(outcome: Outcome) -> str:
        """The verdict in words, bounded, as ``KernelEnv`` shows it."""
        return prompt.feedback(outcome)

    def run_script(self, files: Mapping[str, str], entry: str, wall: float = 30.0) -> ScriptResult:
        """Run a script of the policy's own (a test that it wrote) in the sandbox, away from the grader.

        Args:
            files: name -> text, put into a private folder.
            entry: which of them is run by Python.
            wall: seconds before it is ended.
        """
        self.scripts += 1
        return run_script(files, entry, backend=self.backend, wall=wall)
