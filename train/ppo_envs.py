"""The envs of ``train/ppo.py``: they step side by side, and the schedules of a step are graded in parallel."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import SyncVectorEnv
from kbx_env.train.batch_grader import workers_here

from kbx_env import jsonl
from kbx_env.deadlines import deadline_of
from kbx_env.envs.schedule_env import ScheduleEnv
from kbx_env.executor import Executor, InlinePool, ProcessPool, WorkerPool
from kbx_env.outcome import Outcome

MOST = 64
"""Envs side by side at most: each keeps the features of the tasks that it has seen, which takes memory."""
Grade = Callable[..., Outcome]
"""A function that grades like ``kbx_env.grade``."""


class Recorded(gymnasium.Wrapper[np.ndarray, np.ndarray, np.ndarray, np.ndarray]):
    """Writes a line for each step to the run's file, and passes on to RLlib only whether a step is masked."""

    def __init__(self, env: ScheduleEnv, file: str | Path, count: Callable[[], int]) -> None:
        """Wrap an env.

        Args:
            env: the env.
            file: record of the steps.
            count: returns how many gradings were run since its last call.
        """
        super().__init__(env)
        self.inner, self._file, self._count = env, Path(file), count

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Reset the env."""
        return self.env.reset(seed=seed, options=options)[0], {"masked": False}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, Any, bool, bool, dict[str, Any]]:
        """Step the env and write a line."""
        seen, reward, terminated, truncated, info = self.env.step(action)
        row = {
            "task": info["task"], "settings": info["settings"], "verdict": str(info["outcome"].verdict),
            "correct": info["outcome"].correct, "masked": info["masked"], "value": info["value"],
            "default": self.inner.default(info["task"]),
        }  # fmt: skip
        if not info["outcome"].correct:
            row["message"] = info["outcome"].message[:300]
        row["gradings"] = self._count()  # includes that of the default schedule, where it was not known
        jsonl.append(self._file, row, allow_nan=False)
        return seen, reward, terminated, truncated, {"masked": info["masked"]}


class Together(SyncVectorEnv):
    """``ScheduleEnv`` s that step side by side: the gradings of a step run in parallel, equal ones once.

    Each env steps as it does alone, and its gradings are done already. RLlib would run each env in a process of its own, with a
    grader that does one grading at a time and takes a minute to start (docs/decisions/0016-schedule-env.md).
    """

    def __init__(self, envs: int, file: str | Path, workers: int | None, grade: Grade | None, options: Mapping[str, Any]) -> None:
        """Make the envs and start the workers of their executor.

        Args:
            envs: number of envs.
            file: record of the steps.
            workers: gradings at a time; by default as many as the cores allow.
            grade: grades instead of worker processes; several threads call it.
            options: options of ``ScheduleEnv``; with a ``store``, through which the envs share gradings.

        Raises:
            UsageError: options that an env refuses.
        """
        self._ready: dict[tuple[str, str], Outcome] = {}
        self._uncounted: set[tuple[str, str]] = set()
        self._run = 0
        self._executor: Executor | None = None
        super().__init__([lambda: Recorded(ScheduleEnv(**options, grade=self._graded), file, self._count)] * envs)
        backend = self._envs()[0].backend
        width = workers or workers_here(backend)
        pool: WorkerPool
        if grade:
            pool = InlinePool(lambda task, source, **o: grade(task, source.decode(), **o), width)
        else:
            pool = ProcessPool(width)
        timed = backend == "cuda" and options.get("timing", True)
        self._executor = Executor(pool, deadline=deadline_of(timed, options.get("wall", 30.0)), capacity=sys.maxsize)

    def _envs(self) -> list[ScheduleEnv]:
        return [e.inner for e in self.envs if isinstance(e, Recorded)]

    def step(self, actions: Any) -> Any:
        """Grade the schedules of all actions in parallel, then step every env."""
        assert self._executor is not None
        playing = [(e, a) for e, a, over in zip(self._envs(), actions, self._autoreset_envs, strict=True) if not over]
        wanted = {(r.task, r.source): r for e, a in playing for r in e.needs(a)}
        try:
            futures = {(task, source.decode()): self._executor.submit(r) for (task, source), r in wanted.items()}
            self._ready = {key: f.result() for key, f in futures.items()}
            self._uncounted = set(self._ready)
            return super().step(actions)
        finally:
            self._ready = {}

    def _graded(self, task: str, source: str, **options: Any) -> Outcome:
        """Return a grading of this step; of several envs that need the same one, the first one counts it."""
        self._run += (task, source) in self._uncounted
        self._uncounted.discard((task, source))
        return self._ready[task, source]

    def _count(self) -> int:
        run, self._run = self._run, 0
        return run

    def close_extras(self, **more: Any) -> None:
        """Close the envs and stop the workers."""
        with contextlib.ExitStack() as stack:
            if self._executor is not None:
                stack.callback(self._executor.close)
            super().close_extras(**more)


def side_by_side(batch: int, max_turns: int) -> int:
    """Return the largest number of envs that divides the episodes of a batch, ``MOST`` at most.

    Args:
        batch: steps of a batch.
        max_turns: steps of an episode.

    Returns:
        The number of envs: one step of all of them at a time fills the batch with complete episodes.
    """
    episodes = batch // max_turns
    return max(n for n in range(1, min(episodes, MOST) + 1) if episodes % n == 0)


def make_envs(config: Mapping[str, Any]) -> Together:
    """Make the envs for RLlib, from a config with ``num_envs`` and, as ``env_config``, the other arguments of ``Together``."""
    return Together(config["num_envs"], config["file"], config["workers"], config["grade"], config["options"])
