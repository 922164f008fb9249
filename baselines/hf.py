"""The policy ``hf``: a checkpoint folder, as ``train/`` writes it, asked with its own chat template."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from kbx_env.baselines.llm.access import LOCAL, Access
from kbx_env.baselines.llm.chat import Finish, Message
from kbx_env.baselines.llm.conversation import Conversation, Prompting
from kbx_env.baselines.llm.local import LocalModel
from kbx_env.baselines.llm.method import Method, Sampling, SingleShot
from kbx_env.baselines.policy import Needs

from kbx_env.envs.answer import strip_fences
from kbx_env.envs.episode import Episode, Trajectory
from kbx_env.errors import UsageError
from kbx_env.spec.task import Task

NAME = "hf"
SAMPLING = Sampling(max_tokens=4096, temperature=0.0)
"""Greedy decoding; ``build`` sets a temperature where there are several samples."""


def render(prompt: str, entry: str, prompting: Prompting | None = None) -> Sequence[Message]:
    """Return the messages for a task, the same as in training: a small model keeps its format only with these.

    Args:
        prompt: the task's instruction.
        entry: name of the entry function; not used.
        prompting: how the checkpoint was asked in training.

    Returns:
        One message of the user, after that of the system if training had one.
    """
    return tuple((prompting or Prompting()).messages(prompt))


class Turns(Method):
    """A checkpoint over several turns: verdicts are shown as in training, and the best source is handed in.

    Attributes:
        conversation: renders the turns.
    """

    needs = Needs(grader_feedback=True)

    def __init__(self, folder: str, turns: int, access: Access, sampling: Sampling) -> None:
        """Check a checkpoint.

        Args:
            folder: the checkpoint.
            turns: most submissions a task.
            access: device, samples, limits and ledger; its model is ignored.
            sampling: settings, which ``access`` may replace.

        Raises:
            UsageError: the folder is no checkpoint, or its template changes earlier turns.
        """
        super().__init__(NAME, replace(access, model=None), f"{LOCAL}{folder}", sampling)
        self.name, self._turns, self._context = f"{self.name},turns={turns}", turns, _context(folder)
        server = self.caller.server
        assert isinstance(server, LocalModel)
        self.prompting = server.prompting
        self.conversation = Conversation(server.tokenizer, prompting=server.prompting)
        if turns > 1:
            self.conversation.follow_up("")

    def about(self) -> dict[str, Any]:
        """Return the facts about this policy that a report shows, as plain JSON types."""
        return {**super().about(), "turns": self._turns}

    def run(self, task: Task, env: Episode) -> Trajectory:
        """Solve a task.

        The episode ends early with a correct source (on CUDA, one that is at least as fast as eager), with an answer
        that was cut off, or where no further answer fits into the model's context.

        Args:
            task: the task.
            env: grades sources.

        Returns:
            The best source: correct before wrong, then by reward.
        """
        session = self.caller.session(self.name, task.id, env.sample)
        messages = render(env.prompt, task.entry, self.prompting)
        ids = self.conversation.opening(messages)
        found: list[tuple[tuple[bool, bool, float], str]] = []
        for turn in range(self._turns):
            if turn and self._context is not None and len(ids) >= self._context:
                break
            reply = session.ask(f"turn {turn}", replace(self.sampling.request(messages), ids=tuple(ids)))
            source = strip_fences(reply.text, task.entry, self.prompting.reasoning)
            (outcome,) = env.grade([source], round=turn)
            reward = env.turns[-1].reward
            found.append(((reward is not None, outcome.correct, reward or 0.0), source))
            solved = outcome.correct and (outcome.speedup is None or outcome.speedup >= 1.0)
            if solved or reply.finish is not Finish.STOP:
                break
            ids += self.conversation.answered(reply.text, reply.ids, self.conversation.begun(messages))
            ids += self.conversation.follow_up(env.feedback(outcome), env.prompt)
        return Trajectory(max(found, key=lambda f: f[0])[1], turns=tuple(env.turns))


def _context(folder: str) -> int | None:
    """Return the most tokens of prompt and answer that the model takes; ``None`` if its config does not say."""
    config = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
    found = config.get("max_position_embeddings")
    return found if isinstance(found, int) else None


def build(argument: str | None, access: Access) -> SingleShot | Turns:
    """Make the policy.

    Args:
        argument: the folder, or ``FOLDER,turns=N`` for several turns with the verdicts between them.
        access: device, samples, limits and ledger; its model is ignored.

    Returns:
        A policy of one call for each answer, or one that runs whole episodes where there are turns.

    Raises:
        UsageError: there is no argument, the folder is no checkpoint, or ``turns`` is no number.
    """
    if not argument:
        raise UsageError("policy 'hf' needs a checkpoint folder: hf:FOLDER, or hf:FOLDER,turns=N")
    sampling = SAMPLING if access.samples == 1 else replace(SAMPLING, temperature=0.8)
    folder, comma, count = argument.rpartition(",turns=")
    if comma:
        if not count.isdecimal() or int(count) < 1:
            raise UsageError(f"policy 'hf': turns={count}; a whole number, at least 1")
        return Turns(folder, int(count), access, sampling)
    asked = functools.partial(render, prompting=Prompting.of(argument))
    return SingleShot(NAME, replace(access, model=None), f"{LOCAL}{argument}", sampling, asked)
