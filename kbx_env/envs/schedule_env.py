"""``ScheduleEnv``: choose the numbers of one expert kernel, be graded: a contextual bandit over schedules."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from kbx_env.envs import schedule_features as features
from kbx_env.envs.kernel_env import check_options
from kbx_env.envs.schedule import MIDDLE, MOVES, REACHES, SLOTS, Template, template
from kbx_env.errors import UnknownName, UsageError
from kbx_env.executor.pools.process import Request
from kbx_env.outcome import Fault, Outcome
from kbx_env.spec.catalog import expert_source, load_task, load_tasks
from kbx_env.spec.task import Task
from kbx_env.store import Store

SHAPES = ("train", "eval")
POLICY = "schedule"
"""The name in the store."""


class ScheduleEnv(gymnasium.Env[np.ndarray, np.ndarray]):
    """Choose the block sizes, warps, stages and group of a task's expert kernel.

    **Observation** (Box, float32, ``(len(features.NAMES),)``, every entry in [-1, 1]): the task, its timed shapes, the
    device, what the slots hold, the last grading, and the share of the episode that is over.

    **Action** (MultiDiscrete, ``2 * reach + 1`` choices for each of ``schedule.SLOTS``): ``-reach`` to ``+reach`` steps from
    the expert's own value along a knob's choices, always counted from the expert and stopped at the ends; ``DEFAULT`` of
    an env (``reach`` everywhere) is the expert as it is. Slots without a knob are ignored.

    **Reward**: the preset's; with ``relative`` less that of the expert as it is, graded once a task: 0 is the expert,
    and the range is twice as wide. An infrastructure fault (also of that first grading) gives 0.0 and
    ``info["masked"]`` is True: drop such a step from training. Rewards of the CPU and CUDA backends are not comparable.

    **Episode end**: ``terminated`` after ``max_turns`` gradings. The observation tells the turn, so the end belongs to the
    problem and nothing is to be bootstrapped beyond it.

    ``info``: ``task``; after a step also ``outcome``, ``settings`` (the changed knobs), ``source``, ``masked``, ``terms``,
    ``value`` (the preset's reward, ``None`` if masked), ``default`` (the expert's, ``None`` where it was not needed or is
    not known) and ``cached`` (no grading was run). ``reset(options={"task": id})`` chooses the task.

    A source that was graded is not graded again by the same env, nor where ``store`` knows it. ``shapes="eval"`` adds the
    held-out correctness cases, and times (estimates) held-out sizes instead of the published ones: those it also shows.
    """

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012
    DEFAULT = np.full(len(SLOTS), MIDDLE, np.int64)  # of the longest reach

    def __init__(
        self,
        *,
        task: str | None = None,
        category: str | None = None,
        split: str = "train",
        tasks: str | Sequence[str] = "*",
        backend: str = "auto",
        reward: str | None = None,
        relative: bool = False,
        max_turns: int = 1,
        reach: int = max(MOVES),
        shapes: str = "train",
        idle: Mapping[str, Sequence[str]] | None = None,
        targets: tuple[str, ...] = ("sm_90",),
        timing: bool = True,
        wall: float = 30.0,
        grading_seed: int | None = None,
        store: str | Path | None = None,
        render_mode: str | None = None,
        grade: Callable[..., Outcome] | None = None,
    ) -> None:
        """An env over tasks that have an expert kernel.

        Args:
            task: this one only.
            category: tasks of this category only.
            split: ``train``, ``eval`` or ``all`` tasks.
            tasks: glob over task ids, comma-separated, or a list of ids.
            backend: ``auto``, ``cpu`` or ``cuda``.
            reward: a preset; by default ``estimated`` on the CPU and ``default`` on CUDA, where time is measured.
            relative: less the expert's own reward.
            max_turns: gradings an episode.
            reach: how many steps a move takes at most, 1 or 2.
            shapes: ``train``, or ``eval`` to be graded on the held-out shapes too, and timed on the held-out sizes.
            idle: task -> knobs that take no slot (``schedule.find_idle``).
            targets: ahead-of-time targets.
            timing: time correct kernels (CUDA only).
            wall: seconds for one grading.
            grading_seed: fixes the inputs; secret by default.
            store: file of a ``Store`` that answers for sources graded earlier, also by other processes.
            render_mode: only ``None``.
            grade: grades instead of a ``Grader`` of the env's own, which starts with the first grading.

        Raises:
            UsageError: an unknown name, a number out of range, or no task left that has an expert.
        """
        from kbx_env.executor.direct import retrying
        from kbx_env.grading.grader import Grader, resolve_backend
        from kbx_env.rewards.compose import load_preset

        if render_mode is not None:
            raise UsageError(f"render_mode {render_mode!r}: accepted is None")
        check_options(max_turns, wall, grading_seed, targets)
        if type(reach) is not int or reach not in REACHES:
            raise UsageError(f"reach is {reach!r}; accepted: {', '.join(map(str, REACHES))}")
        if shapes not in SHAPES:
            raise UnknownName("shapes", shapes, SHAPES)
        self.backend = resolve_backend(backend)
        self.reward = load_preset(reward or ("estimated" if self.backend == "cpu" else "default"))
        self.tasks = _chosen(task, category, split, tasks)
        self.max_turns, self.relative, self.render_mode, self.reach = max_turns, relative, render_mode, reach
        self.DEFAULT = np.full(len(SLOTS), reach, np.int64)
        self._idle = {t: tuple(sorted(names)) for t, names in (idle or {}).items()}
        self._options: dict[str, Any] = {
            "backend": self.backend, "targets": tuple(targets), "grading": "contract", "timing": timing, "split": shapes,
            "wall": wall, "seed": grading_seed, "torch_ops": "strict",
            "sizes": "held-out" if shapes == "eval" else "published",
            "estimate": self.reward.estimate if self.backend == "cpu" else None,
        }  # fmt: skip
        self._grader = None if grade else Grader()
        self._grade = grade or retrying(self._grader.grade)  # type: ignore[union-attr]
        self._store = Store(store) if store is not None else None
        self._about: dict[str, str] | None = None
        self._known: dict[tuple[str, str], Outcome] = {}
        self.device = features.device_for(self.backend, self._options["estimate"])
        self._static: dict[str, np.ndarray] = {}
        self.action_space = spaces.MultiDiscrete([2 * reach + 1] * len(SLOTS))
        self.observation_space = spaces.Box(-1.0, 1.0, (len(features.NAMES),), np.float32)
        self._task: Task | None = None
        self._turn, self._last = 0, np.zeros(0, np.float32)
        self.gradings = 0
        """Gradings that were run: the cache and the store answer the others."""

    def template(self, task: str) -> Template:
        """The template of a task, with the slots that actions mean."""
        return template(task, self._idle.get(task, ()), self.reach)

    def default(self, task: str) -> float | None:
        """The preset's reward of the expert as it is, graded on first use; ``None`` for an infrastructure fault."""
        return self.reward(self._graded(task, self.template(task).source)[0])

    def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Begin an episode; ``options={"task": id}`` chooses its task.

        Raises:
            UsageError: unknown option or task, or one without an expert.
        """
        super().reset(seed=seed)
        unknown = set(options or ()) - {"task"}
        if unknown:
            raise UsageError(f"unknown reset option {sorted(unknown)[0]!r}; accepted: 'task'")
        name = (options or {}).get("task")
        if name is not None and not (isinstance(name, str) and name):
            raise UsageError(f"reset option 'task' is {name!r}; a task id such as 'math/softmax'")
        chosen = load_task(name) if name is not None else self.tasks[int(self.np_random.integers(len(self.tasks)))]
        self.template(chosen.id)
        self._task, self._turn = chosen, 0
        self._last = features.changing(0.0, None, None, 0.0, 0.0, 1.0)
        return self._observe(), {"task": chosen.id, "outcome": None}

    def step(self, action: Sequence[int] | np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Grade the schedule that an action means.

        Raises:
            UsageError: called before ``reset``, after the episode's end, or with something outside the action space.
        """
        if self._task is None:
            raise UsageError("step before reset")
        if self._turn >= self.max_turns:
            raise UsageError("the episode is over; reset begins another")
        moves = np.asarray(action)
        if moves.shape != (len(SLOTS),) or not all(0 <= m <= 2 * self.reach and int(m) == m for m in moves):
            raise UsageError(f"the action is {action!r}; {len(SLOTS)} whole numbers from 0 to {2 * self.reach}")
        task, made = self._task.id, self.template(self._task.id)
        source = made.render(moves)
        default = self.default(task) if self.relative else None
        outcome, cached = self._graded(task, source)
        value = self.reward(outcome)
        masked = value is None or (self.relative and default is None)
        low, high = self.reward.range(self.backend)
        self._turn += 1
        self._last = features.changing(
            self._turn / self.max_turns, outcome, moves.astype(np.int64) - self.reach, low if value is None else value, low, high
        )
        info = {
            "task": task, "outcome": outcome, "settings": made.settings(moves), "source": source, "masked": masked,
            "terms": self.reward.terms(outcome), "value": value, "default": default, "cached": cached,
        }  # fmt: skip
        gained = 0.0 if masked or value is None else value - (default or 0.0)
        return self._observe(), float(gained), self._turn >= self.max_turns, False, info

    def needs(self, action: Sequence[int] | np.ndarray) -> list[Request]:
        """What ``step`` with this action, and ``default``, would have graded: nothing that this env or its store knows.

        Raises:
            UsageError: called before ``reset``.
        """
        if self._task is None:
            raise UsageError("needs before reset")
        task, made = self._task.id, self.template(self._task.id)
        sources = dict.fromkeys([made.render(np.asarray(action)), made.source])
        requests = [self._request(task, s) for s in sources if (task, s) not in self._known]
        return [r for r in requests if self._store is None or self._store.get(r.key) is None]

    def _observe(self) -> np.ndarray:
        assert self._task is not None
        name = self._task.id
        if name not in self._static:
            self._static[name] = features.static(
                self._task, self.template(name), self.backend, self.device, self._options["sizes"]
            )  # fmt: skip
        return np.concatenate([self._static[name], self._last])

    def _graded(self, task: str, source: str) -> tuple[Outcome, bool]:
        """The outcome, and whether it was known."""
        found = self._known.get((task, source))
        request = self._request(task, source) if self._store is not None and found is None else None
        if found is None and request is not None and self._store is not None:
            found = self._store.get(request.key)
        cached = found is not None
        outcome = found or self._grade(task, source, **self._options)
        self.gradings += not cached
        if outcome.fault is not Fault.INFRA:
            self._known[task, source] = outcome
            if request is not None and self._store is not None and not cached and not outcome.manifest.get("without"):
                self._store.put(request.key, POLICY, 0, request.record, request.source, outcome)
                # Who else has measured it meanwhile was first: all that share the store must know the same.
                outcome = self._known[task, source] = self._store.get(request.key) or outcome
        return outcome, cached

    def _request(self, task: str, source: str) -> Request:
        from kbx_env import versions

        if self._about is None:
            self._about = versions.environment(self.backend)
        about = {**self._about, "fingerprint": load_task(task).fingerprint}
        return Request(task, source.encode(), self._options, about, POLICY)

    def close(self) -> None:
        """End the sandbox and close the store."""
        if self._grader is not None:
            self._grader.close()
        if self._store is not None:
            with contextlib.suppress(Exception):
                self._store.close()


def _chosen(task: str | None, category: str | None, split: str, tasks: str | Sequence[str]) -> list[Task]:
    """The tasks that were asked for; an expert each."""
    if task is not None:
        found = [load_task(task)]
    elif isinstance(tasks, str):
        found = load_tasks(category=category, split=split, pattern=tasks)
    else:
        found = [load_task(t) for t in tasks]
    having = [t for t in found if expert_source(t.id) is not None]
    if not having:
        raise UsageError(f"no expert kernel for {', '.join(t.id for t in found[:3]) or 'an empty list of tasks'}")
    return having
