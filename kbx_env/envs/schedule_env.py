"""``ScheduleEnv``: an agent chooses the numbers of an expert kernel, a contextual bandit over schedules."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from kbx_env.envs import schedule_features as features
from kbx_env.envs.kernel_env import check_turns
from kbx_env.envs.schedule import MIDDLE, MOVES, REACHES, SLOTS, Template, template
from kbx_env.errors import UnknownName, UsageError
from kbx_env.executor.pools.process import Request
from kbx_env.options import GradeOptions, resolve_backend
from kbx_env.outcome import Fault, Outcome
from kbx_env.spec.catalog import expert_source, load_task, load_tasks
from kbx_env.spec.task import Task
from kbx_env.store import Store

SHAPES = ("train", "eval")
POLICY = "schedule"
"""The policy's name in stored gradings."""


class ScheduleEnv(gymnasium.Env[np.ndarray, np.ndarray]):
    """An agent chooses block sizes, warps, stages and group of a task's expert kernel.

    A step grades one schedule. Made by ``gymnasium.make("kbx/Schedule-v0", ...)``.

    ## Observation Space

    ``Box`` of shape ``(len(features.NAMES),)``, float32, entries in [-1, 1]: the task, its timed shapes, the device,
    the contents of the slots, the last grading, and the share of the episode that is over
    (``schedule_features.NAMES``).

    ## Action Space

    ``MultiDiscrete`` with ``2 * reach + 1`` choices for each of ``schedule.SLOTS``: a move of ``-reach`` to ``+reach``
    steps along the choices of the slot's knobs. Moves count from the expert's own values, also in later turns, and stop
    at the ends of the choices. The attribute ``DEFAULT`` of an env (``reach`` in every slot) is the unchanged expert.
    Moves of slots without knobs are ignored.

    ## Rewards

    The value of a preset (``rewards/presets/``) for the schedule's outcome. With ``relative`` the value of the
    unchanged expert is subtracted, which is graded once for each task: the expert's reward is 0, and the range is twice
    as wide. Rewards of the CPU and the CUDA backend cannot be compared.

    After an infrastructure fault, also in the grading of the unchanged expert, the step returns 0.0 and
    ``info["masked"]`` is true: leave such steps out of training.

    ## Starting State

    ``reset`` draws a task uniformly from the selected ones; ``reset(options={"task": id})`` chooses the task.

    ## Episode End

    ``terminated`` after ``max_turns`` gradings; never ``truncated``. The observation contains the turn, so a learner
    must not bootstrap a value beyond the end.

    ## Info

    ``task`` (id) and ``outcome`` (``Outcome``; ``None`` after ``reset``). After a step also ``settings`` (new values of
    the changed knobs), ``source``, ``masked``, ``terms`` (value of each reward term by name), ``value`` (the preset's
    value, ``None`` if masked), ``default`` (that of the unchanged expert, ``None`` if not needed or unknown) and
    ``cached`` (whether no grading was run).

    ## Arguments

    ``gymnasium.make("kbx/Schedule-v0", split="train", backend="auto", max_turns=1)``; ``__init__`` describes all
    arguments.

    Attributes:
        gradings: number of gradings that were run; the env's cache and the store answer the others.
    """

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012
    DEFAULT = np.full(len(SLOTS), MIDDLE, np.int64)
    """The action that changes nothing, for the default ``reach``; an env has its own."""

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
        tasks_from: str | None = None,
        render_mode: str | None = None,
        grade: Callable[..., Outcome] | None = None,
    ) -> None:
        """Make an env over tasks that have an expert kernel. The grader's processes start with the first grading.

        Args:
            task: id of the only task; by default the tasks that the next three arguments select.
            category: category of the tasks; ``None`` for all.
            split: ``train``, ``eval`` or ``all`` tasks.
            tasks: globs over task ids, separated by commas, or a list of ids.
            backend: ``cpu``, ``cuda``, or ``auto``: CUDA if there is a GPU.
            reward: name of the preset; by default ``estimated`` on the CPU, and ``default`` on CUDA, where time is
                measured.
            relative: subtract the reward of the unchanged expert.
            max_turns: gradings an episode.
            reach: most steps of a move, 1 or 2.
            shapes: ``train``, or ``eval`` to grade on the held-out shapes too, and to time (or estimate) and observe
                the held-out sizes in place of the published ones.
            idle: names of knobs that get no slot, by task id (``schedule.find_idle``).
            targets: names of the targets for which kernels are also compiled ahead of time.
            timing: time correct kernels (CUDA only).
            wall: seconds of wall time for a submission, over all stages but timing.
            grading_seed: fixes the inputs of gradings; ``None`` for secret inputs, new for every grading.
            store: file of a ``Store``; sources that were graded before, also by other processes, are not graded again.
            tasks_from: task packs from which the tasks are, as for ``KernelEnv``.
            render_mode: must be ``None``.
            grade: called as ``Grader.grade`` in its place.

        Raises:
            UsageError: an unknown name, a number out of its range, or no selected task has an expert.
        """
        from kbx_env.executor.direct import retrying
        from kbx_env.grading.grader import Grader
        from kbx_env.rewards.compose import load_preset

        if render_mode is not None:
            raise UsageError(f"render_mode {render_mode!r}: accepted is None")
        check_turns(max_turns, grading_seed)
        if type(reach) is not int or reach not in REACHES:
            raise UsageError(f"reach is {reach!r}; accepted: {', '.join(map(str, REACHES))}")
        if shapes not in SHAPES:
            raise UnknownName("shapes", shapes, SHAPES)
        self.backend = resolve_backend(backend)
        self.reward = load_preset(reward or ("estimated" if self.backend == "cpu" else "default"))
        self.tasks = _chosen(task, category, split, tasks, tasks_from)
        self.max_turns, self.relative, self.render_mode, self.reach = max_turns, relative, render_mode, reach
        self.DEFAULT = np.full(len(SLOTS), reach, np.int64)
        self._idle = {t: tuple(sorted(names)) for t, names in (idle or {}).items()}
        self._options: dict[str, Any] = {
            "backend": self.backend, "targets": tuple(targets), "grading": "contract", "timing": timing, "split": shapes,
            "wall": wall, "seed": grading_seed, "torch_ops": "strict",
            "sizes": "held-out" if shapes == "eval" else "published",
            "estimate": self.reward.estimate if self.backend == "cpu" else None,
        }  # fmt: skip
        GradeOptions.of(self._options).resolved()
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

    def template(self, task: str) -> Template:
        """Return the template of a task: its expert with knobs in slots."""
        return template(task, self._idle.get(task, ()), self.reach)

    def default(self, task: str) -> float | None:
        """Return the preset's value for the unchanged expert, graded on first use; ``None`` if that is masked."""
        return self.reward(self._graded(task, self.template(task).source)[0])

    def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Begin an episode.

        Args:
            seed: of the choice of tasks, for this and later episodes; ``None`` to continue the sequence.
            options: ``{"task": id}`` to choose the task.

        Returns:
            The observation and the info.

        Raises:
            UsageError: an unknown option or task, or a task without an expert.
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

        Args:
            action: integers of shape (8,), each from 0 to ``2 * reach``.

        Returns:
            Observation, reward, terminated, truncated, and info, as the class describes them.

        Raises:
            UsageError: ``reset`` was not called before, the episode is over, or the action is not in the action space.
        """
        if self._task is None:
            raise UsageError("step before reset")
        if self._turn >= self.max_turns:
            raise UsageError("the episode is over; reset begins another")
        moves = np.asarray(action)
        if moves.shape != (len(SLOTS),) or not all(0 <= m <= 2 * self.reach and int(m) == m for m in moves):
            raise UsageError(f"the action is {action!r}; {len(SLOTS)} whole numbers from 0 to {2 * self.reach}")
        task, expert = self._task.id, self.template(self._task.id)
        source = expert.render(moves)
        default = self.default(task) if self.relative else None
        outcome, cached = self._graded(task, source)
        value = self.reward(outcome)
        masked = value is None or (self.relative and default is None)
        low, high = self.reward.range(self.backend)
        self._turn += 1
        self._last = features.changing(
            self._turn / self.max_turns, outcome, moves.astype(np.int64) - self.reach,
            low if value is None else value, low, high,
        )  # fmt: skip
        info = {
            "task": task, "outcome": outcome, "settings": expert.settings(moves), "source": source, "masked": masked,
            "terms": self.reward.terms(outcome), "value": value, "default": default, "cached": cached,
        }  # fmt: skip
        reward = 0.0 if masked or value is None else value - (default or 0.0)
        return self._observe(), float(reward), self._turn >= self.max_turns, False, info

    def needs(self, action: Sequence[int] | np.ndarray) -> list[Request]:
        """Return the gradings that ``step`` with an action, and ``default``, would run.

        Args:
            action: integers of shape (8,), each from 0 to ``2 * reach``.

        Returns:
            Requests for sources that neither this env nor its store knows; may be empty.

        Raises:
            UsageError: ``reset`` was not called before.
        """
        if self._task is None:
            raise UsageError("needs before reset")
        task, expert = self._task.id, self.template(self._task.id)
        sources = dict.fromkeys([expert.render(np.asarray(action)), expert.source])
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
        """Return the outcome of a source, and whether the cache or the store knew it."""
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
                # Another process may have stored an outcome in between; all users of the store must have the same one.
                outcome = self._known[task, source] = self._store.get(request.key) or outcome
        return outcome, cached

    def _request(self, task: str, source: str) -> Request:
        from kbx_env import versions

        if self._about is None:
            self._about = versions.environment(self.backend)
        about = {**self._about, "fingerprint": load_task(task).fingerprint}
        return Request(task, source.encode(), self._options, about, POLICY)

    def close(self) -> None:
        """End the grader's processes, and close the store."""
        if self._grader is not None:
            self._grader.close()
        if self._store is not None:
            with contextlib.suppress(Exception):
                self._store.close()


def _chosen(
    task: str | None, category: str | None, split: str, tasks: str | Sequence[str], tasks_from: str | None
) -> list[Task]:  # fmt: skip
    """Return the selected tasks that have an expert."""
    if task is not None:
        found = [load_task(task, tasks_from)]
    elif isinstance(tasks, str):
        found = load_tasks(category=category, split=split, pattern=tasks, tasks_from=tasks_from)
    else:
        found = [load_task(t, tasks_from) for t in tasks]
    having = [t for t in found if expert_source(t.id) is not None]
    if not having:
        raise UsageError(f"no expert kernel for {', '.join(t.id for t in found[:3]) or 'an empty list of tasks'}")
    return having
