"""SkyRL-gym (0.4): a text environment.

Register it where the trainer starts:

    import skyrl_gym.envs
    skyrl_gym.envs.register(id="kbx_kernel", entry_point="kbx_env.integrations.skyrl:KernelTextEnv")
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput, ConversationType

from kbx_env.errors import UsageError
from kbx_env.integrations.episode import KernelEpisode
from kbx_env.train.warm_grader import WarmGrader, shared

ENV = "kbx_kernel"
"""Name of the environment in rows of data (``env_class``)."""


class KernelTextEnv(BaseTextEnv):
    """An episode of one task; each answer is graded, and the verdict is the next message.

    SkyRL has no unknown reward: a masked grading is paid 0.0 and ends the episode, ``metadata["masked"]`` is true, and the
    metric ``masked`` counts it. Watch that metric; leave such episodes out where your trainer can.
    """

    def __init__(self, env_config: Any = None, extras: Mapping[str, Any] | None = None, grader: WarmGrader | None = None) -> None:
        """An environment of one row of data.

        Args:
            env_config: options of the grader (``preset``, ``backend``, ``url``, ``token``, ...) and ``max_turns``.
            extras: the row: ``task``, or ``extra_info`` with it, and ``max_turns``.
            grader: replaces the grader of ``env_config``.

        Raises:
            UsageError: the row names no task.
        """
        super().__init__()
        options, row = dict(env_config or {}), dict(extras or {})
        task = row.get("task") or (row.get("extra_info") or {}).get("task")
        if not task:
            raise UsageError("the row has no 'task'; make data with kbx_env.integrations.skyrl.write_rows")
        self.max_turns = int(options.pop("max_turns", None) or row.get("max_turns") or 1)
        self._episode = KernelEpisode(grader or shared(**options), task, self.max_turns)

    def init(self, prompt: ConversationType) -> tuple[ConversationType, dict[str, Any]]:
        """Return the first prompt of the episode, unchanged.

        Args:
            prompt: the messages of the row.

        Returns:
            The messages, and the task's id.
        """
        return prompt, {"task": self._episode.task}

    def step(self, action: str) -> BaseTextEnvStepOutput:
        """Grade an answer.

        Args:
            action: the model's answer.

        Returns:
            Feedback as a user's message (none at the end), reward, whether the episode is over, and facts as metadata.
        """
        self.turns += 1
        last = self._episode.step(action)
        done = last.done or last.masked
        messages = [] if done else [{"role": "user", "content": last.feedback}]
        return BaseTextEnvStepOutput(
            observations=messages, reward=0.0 if last.reward is None else last.reward, done=done, metadata=last.facts()
        )

    def get_metrics(self) -> dict[str, Any]:
        """Return ``solved``, ``compiled``, ``correct``, ``masked`` and turns of the episode, and the terms of its last answer."""
        played = self._episode.submissions
        if not played:
            return {}
        last = played[-1]
        return {
            "solved": float(any(s.solved for s in played)), "compiled": float(any(s.graded.compiled for s in played)),
            "correct": float(any(s.graded.outcome.correct for s in played)), "masked": float(any(s.masked for s in played)),
            "turns": len(played), **{f"terms/{k}": v for k, v in last.graded.terms.items() if v is not None},
        }  # fmt: skip


def write_rows(path: str | Path, split: str = "train", category: str | None = None, backend: str = "auto") -> Path:
    """Write prompts as a parquet file of SkyRL: ``data_source``, ``prompt``, ``env_class``, ``reward_spec``, ``task``.

    Args:
        path: the file.
        split: ``train``, or ``eval`` to evaluate.
        category: category of the tasks; ``None`` for all.
        backend: ``cpu``, ``cuda`` or ``auto``: the text says whether kernels are timed.

    Returns:
        The file.
    """
    from kbx_env.integrations import rows

    made = ({**row, "env_class": ENV, "reward_spec": {"method": "rule", "ground_truth": row["task"]}}
            for row in rows.plain(split, category, backend))  # fmt: skip
    return rows.write(path, made)
