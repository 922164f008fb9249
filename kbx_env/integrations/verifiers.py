"""verifiers (0.4, the ``v1`` interface): a taskset whose tasks are graded here.

verifiers finds tasksets by the name of a top-level module, so make one of a line, ``kbx_kernels.py``:

    from kbx_env.integrations.verifiers import KernelTaskset, __all__

and name it: ``vf-eval kbx_kernels --env.taskset.split eval --env.taskset.task.url http://HOST:8300``. The interface before
0.4 (``vf.Rubric``, ``load_environment(**kwargs)``) is no longer a part of verifiers.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import verifiers.v1 as vf

from kbx_env.envs.prompt import instruction
from kbx_env.integrations.episode import chosen_tasks
from kbx_env.options import resolve_backend
from kbx_env.spec.catalog import load_task
from kbx_env.train.batch_grader import GradedAnswer
from kbx_env.train.warm_grader import shared

__all__ = ["KernelTaskset"]


class KernelConfig(vf.TaskConfig):
    """How answers are graded (``--env.taskset.task.*``)."""

    preset: str = "default"
    """Name of the reward preset, or python:module:attribute."""
    backend: str = "auto"
    """cpu, cuda, or auto."""
    url: str | None = None
    """Address of a grading service; by default this machine grades."""
    token: str | None = None
    """Its bearer token; by default the environment variable KBX_TOKEN."""
    workers: int | None = None
    """Gradings at a time."""


class KernelTasksetConfig(vf.TasksetConfig):
    """Which tasks there are (``--env.taskset.*``)."""

    task: KernelConfig = KernelConfig()
    split: str = "train"
    """train, or eval to evaluate."""
    category: str | None = None
    """One category only."""
    tasks: str = "*"
    """Globs over ids or names, comma-separated."""


class KernelData(vf.TaskData):
    """One task, as it is written to traces."""

    task: str
    category: str
    difficulty: int


class KernelTask(vf.Task[KernelData, vf.State, KernelConfig]):
    """Grades the last reply of a trace, once for all its signals.

    A grading that the machine lost raises: verifiers then records an error of the task, which has no reward.
    """

    @property
    def key(self) -> str:
        """The task's id."""
        return self.data.task

    async def _graded(self, trace: vf.Trace) -> GradedAnswer:
        c = self.config
        place: dict[str, Any] = {} if c.url is None else {"url": c.url, "token": c.token}
        grader = shared(c.preset, c.backend, workers=c.workers, **place)
        (graded,) = await grader.agrade([(self.data.task, trace.last_reply)])
        if graded.reward is None:
            raise vf.TaskError(f"the grading of {self.data.task} was lost: {graded.outcome.message}")
        return graded

    @vf.reward
    async def kernel(self, trace: vf.Trace) -> float:
        """The value of the preset; also records ``compiled``, ``correct``, ``solved``, ``speedup`` and the terms as metrics."""
        graded = await self._graded(trace)
        known = {"compiled": graded.compiled, "correct": graded.outcome.correct, "solved": graded.solved,
                 "speedup": graded.outcome.speedup, **{f"term_{k}": v for k, v in graded.terms.items()}}  # fmt: skip
        trace.record_metrics({name: float(value) for name, value in known.items() if value is not None})
        trace.info["verdict"] = str(graded.outcome.verdict)
        trace.info["feedback"] = graded.feedback
        assert graded.reward is not None
        return graded.reward


class KernelTaskset(vf.Taskset[KernelTask, KernelTasksetConfig]):
    """The tasks of a split."""

    def load(self) -> Iterable[KernelTask]:
        """Yield the tasks, sorted by id."""
        c = self.config
        backend = c.task.backend
        if backend == "auto":  # the prompt says whether kernels are timed
            place: dict[str, Any] = {} if c.task.url is None else {"url": c.task.url, "token": c.task.token}
            backend = shared(c.task.preset, workers=c.task.workers, **place).start().backend if place else resolve_backend("auto")
        for name in chosen_tasks(c.split, c.category, c.tasks):
            task = load_task(name)
            data = KernelData(
                id=task.id, name=task.id, prompt=instruction(task, backend), task=task.id, category=task.category,
                difficulty=task.difficulty,
            )  # fmt: skip
            yield KernelTask(data, c.task)
