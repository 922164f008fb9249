"""``KernelEnv``: an episode is one task, an action is the source text of a kernel."""

from __future__ import annotations

import dataclasses
import functools
import string
from collections.abc import Callable, Mapping
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.error import CustomSpaceError
from gymnasium.vector.utils import create_shared_memory

from kbx_env.client import Client
from kbx_env.envs import prompt
from kbx_env.envs.answer import strip_fences
from kbx_env.errors import UsageError
from kbx_env.options import GradeOptions
from kbx_env.outcome import Outcome, Verdict
from kbx_env.spec.catalog import load_task, load_tasks
from kbx_env.spec.task import Task

MAX_TEXT = 1 << 20
"""Most characters of a text."""


class Source(spaces.Text):
    """A space of texts of any characters up to a length; gymnasium's own accepts ASCII letters and digits only."""

    def __init__(self, max_length: int = MAX_TEXT) -> None:
        """Make the space.

        Args:
            max_length: most characters.
        """
        super().__init__(max_length, min_length=0, charset="".join(sorted(string.printable)))

    def contains(self, x: Any) -> bool:
        """Return whether ``x`` is a string that is short enough."""
        return isinstance(x, str) and len(x) <= self.max_length

    def sample(self, mask: Any = None, probability: Any = None) -> str:
        """Draw a text of less than 64 printable ASCII characters.

        Args:
            mask: ignored.
            probability: ignored.

        Returns:
            The text. It is short, so that samples stay cheap.
        """
        letters = self.np_random.choice(list(self.characters), size=int(self.np_random.integers(0, 64)))
        return "".join(map(str, letters))


@create_shared_memory.register(Source)
def _no_shared_memory(space: Source, n: int = 1, ctx: Any = None) -> Any:
    raise CustomSpaceError("text of any characters does not fit gymnasium's shared memory")


class KernelEnv(gymnasium.Env[dict[str, Any], str]):
    """An agent writes a Triton kernel for a task, reads the verdict, and tries again.

    An episode is one task. A step grades one submission. Made by ``gymnasium.make("kbx/Kernel-v0", ...)``.

    ## Observation Space

    A ``Dict``:

    | key | space | content |
    |---|---|---|
    | ``task`` | ``Text`` | id of the task, ``category/name`` |
    | ``prompt`` | ``Text`` | instruction: signature, contract, rules |
    | ``feedback`` | ``Text`` | verdict on the last submission as text; empty before the first one |
    | ``turn`` | ``Discrete`` | number of submissions so far, 0 to ``max_turns`` |
    | ``best`` | ``Box``, shape (), float32 | highest value of the preset so far; first the preset's minimum |
    | ``passed`` | ``Box``, shape (), float32 | share of the cases that the last submission passed, 0 to 1 |

    ## Action Space

    Text: the source of a module, or a whole answer of a model. If there are fenced blocks, the largest one that is valid
    Python is graded.

    ## Rewards

    The value of a preset (``rewards/presets/``) for the submission's outcome. Rewards of the CPU and the CUDA backend
    have different ranges and cannot be compared.

    An infrastructure fault has no value. Because gymnasium has no unknown reward, the step returns 0.0 and
    ``info["masked"]`` is true: leave such steps out of training.

    A preset with shaping terms (``beginner``, ``fusion``, ``quantization``) pays them in one of two ways:

    - ``max_turns=1``: the reward is the preset's value, in which wrong kernels lose what shaping terms lack.
    - ``max_turns>1``: the reward is the preset's value without shaping terms (``Reward.base``), plus the
      potential-based shaping of the step (``rewards/shaping.py``), whose discounted sum over an episode is 0.

    ``observation["best"]`` follows the preset's value in both cases. With shaping and several turns it therefore
    differs from the highest reward that ``step`` has returned: a reward may be negative, ``best`` is never below the
    preset's minimum and never decreases. Masked steps do not change it.

    ## Starting State

    ``reset`` draws a task uniformly from the selected ones; ``reset(options={"task": id})`` chooses any task.
    ``reset(seed=...)`` makes the choice of tasks reproducible. Inputs of gradings are secret and new for every grading,
    unless the env is made with ``grading_seed``.

    ## Episode End

    - ``terminated``: the submission is correct, and where kernels are timed (CUDA) at least ``target`` times as fast as
      eager.
    - ``truncated``: ``max_turns`` submissions without that.

    ## Info

    ``task`` (id) and ``outcome`` (``Outcome``; ``None`` after ``reset``). After a step also ``masked``, ``terms``
    (value of each reward term by name, unweighted) and ``shaping`` (potential-based shaping of the step, ``None`` if
    masked).

    ## Vector Environments

    Use ``vector_kwargs={"shared_memory": False}`` with ``AsyncVectorEnv``; gymnasium's shared memory cannot carry this
    text.

    ## Arguments

    ``gymnasium.make("kbx/Kernel-v0", split="train", backend="auto", reward="default", max_turns=4)``; ``__init__``
    describes all arguments.
    """

    metadata: dict[str, Any] = {"render_modes": ["ansi"], "render_fps": 1}  # noqa: RUF012

    def __init__(
        self,
        *,
        task: str | None = None,
        category: str | None = None,
        split: str = "train",
        backend: str = "auto",
        reward: str = "default",
        max_turns: int = 4,
        grading: str = "contract",
        torch_ops: str = "strict",
        sizes: str = "published",
        precision: str = "report",
        target: float = 1.0,
        targets: tuple[str, ...] = ("sm_90",),
        timing: bool = True,
        wall: float = 30.0,
        grading_seed: int | None = None,
        gamma: float = 1.0,
        tasks_from: str | None = None,
        render_mode: str | None = None,
        grader: str | None = None,
        grade: Callable[..., Outcome] | None = None,
    ) -> None:
        """Make an env. The grader's processes start with the first step.

        Args:
            task: id of the only task; by default the tasks of a category and split.
            category: category of the tasks; ``None`` for all.
            split: ``train``, ``eval`` or ``all`` tasks, or a split of a task pack. With ``eval`` submissions are also
                graded on held-out shapes.
            backend: ``cpu``, ``cuda``, or ``auto``: CUDA if there is a GPU.
            reward: name of the preset.
            max_turns: most submissions an episode.
            grading: ``contract``, or ``paper`` for the paper's own check, which pays torch as well (never train on it).
            torch_ops: ``strict``, or ``allow`` to let the wrapper compute in torch.
            sizes: the sizes on which kernels are timed (or estimated): ``published``, or ``held-out`` for evaluation.
            precision: how precisely kernels are timed: ``report`` (1 %), or ``training`` (3 %), which takes about half the time.
            target: speedup over eager from which an episode counts as solved (CUDA with timing).
            targets: names of the targets for which kernels are also compiled ahead of time; empty for none.
            timing: time correct kernels (CUDA only).
            wall: seconds of wall time for a submission, over all stages but timing.
            grading_seed: fixes the inputs of gradings; ``None`` for secret inputs, new for every grading.
            gamma: the learner's discount, from 0 to 1, for potential-based shaping.
            tasks_from: task packs (folders or names, separated by commas) from which the tasks are; ``builtin`` for the
                benchmark's own; ``None`` for those of ``KBX_TASKS``.
            render_mode: ``None`` or ``ansi``.
            grader: address of a grading service (``kbx serve``) that grades in place of this process, such as
                ``http://127.0.0.1:8300``; its token is in the environment variable ``KBX_TOKEN``.
            grade: called as ``Grader.grade`` in its place.

        Raises:
            UsageError: an unknown name, or a number out of its range.
        """
        from kbx_env.executor.direct import retrying
        from kbx_env.grading.grader import Grader
        from kbx_env.rewards.compose import load_preset
        from kbx_env.rewards.shaping import Shaping

        if render_mode not in (None, "ansi"):
            raise UsageError(f"render_mode {render_mode!r}: accepted are None and 'ansi'")
        check_turns(max_turns, grading_seed)
        if not isinstance(gamma, int | float) or not 0 <= gamma <= 1:
            raise UsageError(f"gamma is {gamma!r}; the learner's discount, from 0 to 1")
        self.tasks: list[Task] = (
            [load_task(task, tasks_from)] if task else load_tasks(category=category, split=split, tasks_from=tasks_from)
        )
        self.reward = load_preset(reward)
        service: Client | None = None
        if grader is not None:
            backend, service = _connected(grader, backend)
        options = GradeOptions(
            backend=backend, targets=tuple(targets), grading=grading, seed=grading_seed, timing=timing,
            split="eval" if split == "eval" else "train", wall=wall, estimate=self.reward.estimate, torch_ops=torch_ops,
            sizes=sizes, precision=precision,
        )  # fmt: skip
        options = options.resolved() if service is None else options
        self.backend, self.split = options.backend, options.split
        self.max_turns, self.grading, self.target = max_turns, grading, target
        self.render_mode = render_mode
        self._options = dataclasses.asdict(options)
        self._grader: Grader | Client | None = service
        if service is not None:
            self._grade = grade or service.grade
        else:
            local = self._grader = None if grade else Grader()
            self._grade = grade or retrying(local.grade)  # type: ignore[union-attr]
        low, high = self.reward.range(self.backend)
        self.action_space = Source()
        self.observation_space = spaces.Dict({
            "task": Source(256), "prompt": Source(), "feedback": Source(),
            "turn": spaces.Discrete(max_turns + 1),
            "best": spaces.Box(np.float32(low), np.float32(high), (), np.float32),
            "passed": spaces.Box(np.float32(0), np.float32(1), (), np.float32),
        })  # fmt: skip
        self._task: Task | None = None
        self._outcome: Outcome | None = None
        self._turn, self._best = 0, low
        self._new_shaping = functools.partial(Shaping, gamma)
        self._shaping = self._new_shaping()

    def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None, **row: Any
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Begin an episode.

        Args:
            seed: of the choice of tasks, for this and later episodes; ``None`` to continue the sequence.
            options: ``{"task": id}`` to choose the task.
            **row: refused. TRL passes a row of data where this class is its ``environment_factory``.

        Returns:
            The observation and the info.

        Raises:
            UsageError: an unknown option, task or argument.
        """
        if row:
            raise UsageError(
                f"KernelEnv.reset has no argument {sorted(row)[0]!r}; it is a gymnasium environment. As environment_factory of "
                "TRL use kbx_env.trl.KernelTools, as reward_funcs kbx_env.trl.KernelReward"
            )
        super().reset(seed=seed)
        unknown = set(options or ()) - {"task"}
        if unknown:
            raise UsageError(f"unknown reset option {sorted(unknown)[0]!r}; accepted: 'task'")
        name = (options or {}).get("task")
        if name is not None and not (isinstance(name, str) and name):
            raise UsageError(f"reset option 'task' is {name!r}; a task id such as 'math/softmax'")
        self._task = load_task(name) if name is not None else self.tasks[int(self.np_random.integers(len(self.tasks)))]
        self._outcome, self._turn, self._best = None, 0, self.reward.range(self.backend)[0]
        self._shaping = self._new_shaping()
        return self._observe(), {"task": self._task.id, "outcome": None}

    def step(self, action: str) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        """Grade a submission.

        Args:
            action: the source of a module, or a whole answer of a model.

        Returns:
            Observation, reward, terminated, truncated, and info, as the class describes them.

        Raises:
            UsageError: ``reset`` was not called before, or the action is not text.
        """
        if self._task is None:
            raise UsageError("step before reset")
        if not isinstance(action, str):
            raise UsageError(f"the action is a {type(action).__name__}; it must be the source text (str)")
        outcome = self._grade(self._task.id, strip_fences(action, self._task.entry), **self._options)
        self._outcome = outcome
        self._turn += 1
        value = self.reward(outcome)
        masked = value is None
        if value is not None:
            self._best = max(self._best, value)
        fast = self.backend == "cpu" or not self._options["timing"] or (outcome.speedup or 0.0) >= self.target
        solved = outcome.correct and fast
        truncated = not solved and self._turn >= self.max_turns
        shaping = self._shaping.step(self.reward.potential(outcome), solved or truncated)
        if self.max_turns > 1 and self.reward.shaping and value is not None:
            value = (self.reward.base(outcome) or 0.0) + (shaping or 0.0)
        info = {
            "task": self._task.id, "outcome": outcome, "masked": masked, "terms": self.reward.terms(outcome),
            "shaping": shaping,
        }  # fmt: skip
        return self._observe(), float(value or 0.0), solved, truncated, info

    def _observe(self) -> dict[str, Any]:
        assert self._task is not None
        cases = self._outcome.cases if self._outcome else None
        passed = cases.passed / cases.total if cases and self._outcome and not self._outcome.violations else 0.0
        return {
            "task": self._task.id, "prompt": prompt.instruction(self._task, self.backend)[:MAX_TEXT],
            "feedback": prompt.feedback(self._outcome) if self._outcome else "",
            "turn": np.int64(min(self._turn, self.max_turns)),
            "best": np.array(self._best, np.float32), "passed": np.array(passed, np.float32),
        }  # fmt: skip

    def render(self) -> str | None:  # type: ignore[override]
        """Return the state of the episode as text; ``None`` before ``reset`` or without ``render_mode="ansi"``."""
        if self.render_mode != "ansi" or self._task is None:
            return None
        last = "no submission yet"
        if self._outcome is not None:
            last = prompt.feedback(self._outcome)
            if self._outcome.verdict is Verdict.CORRECT:
                last = "solved\n" + last
        return f"{self._task.id} turn {self._turn}/{self.max_turns}\n{last}\n"

    def close(self) -> None:
        """End the grader's processes."""
        if self._grader is not None:
            self._grader.close()


def _connected(url: str, backend: str) -> tuple[str, Client]:
    """Return the backend of a grading service, and a client of it."""
    from kbx_env.executor.pools.remote import RemotePool

    pool = RemotePool(url)
    return pool.backend(backend), pool.client


def check_turns(max_turns: int, grading_seed: int | None) -> None:
    """Check the arguments that all environments share and that ``GradeOptions`` does not have.

    Args:
        max_turns: most submissions an episode, at least 1.
        grading_seed: an integer, or ``None``.

    Raises:
        UsageError: a number is out of its range.
    """
    if type(max_turns) is not int or max_turns < 1:
        raise UsageError(f"max_turns is {max_turns!r}; a whole number, at least 1")
    if grading_seed is not None and type(grading_seed) is not int:
        raise UsageError(f"grading_seed is {grading_seed!r}; a whole number, or None for secret inputs")
