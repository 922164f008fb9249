"""``KernelEnv``: one task is one episode, an action is the source text of a kernel."""

from __future__ import annotations

import functools
import string
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.error import CustomSpaceError
from gymnasium.vector.utils import create_shared_memory

from kbx_env.envs import prompt
from kbx_env.envs.answer import strip_fences
from kbx_env.errors import UnknownName, UsageError
from kbx_env.outcome import Outcome, Verdict
from kbx_env.spec.catalog import load_task, load_tasks
from kbx_env.spec.task import Task

MAX_TEXT = 1 << 20


class Source(spaces.Text):
    """Text of any characters up to a length: the stock space accepts ASCII letters and digits only."""

    def __init__(self, max_length: int = MAX_TEXT) -> None:
        super().__init__(max_length, min_length=0, charset="".join(sorted(string.printable)))

    def contains(self, x: Any) -> bool:
        """Whether ``x`` is a string that is short enough."""
        return isinstance(x, str) and len(x) <= self.max_length

    def sample(self, mask: Any = None, probability: Any = None) -> str:
        """A short random text (a random megabyte helps nobody)."""
        letters = self.np_random.choice(list(self.characters), size=int(self.np_random.integers(0, 64)))
        return "".join(map(str, letters))


@create_shared_memory.register(Source)
def _no_shared_memory(space: Source, n: int = 1, ctx: Any = None) -> Any:
    raise CustomSpaceError("text of any characters does not fit gymnasium's shared memory")


class KernelEnv(gymnasium.Env[dict[str, Any], str]):
    """Write a Triton kernel for a task, read the verdict, try again.

    **Observation** (Dict): ``task`` id, ``prompt`` instruction text, ``feedback`` on the last submission (empty
    at first), ``turn`` number of submissions so far, ``best`` reward so far, ``passed`` share of cases passed by
    the last submission.

    **Action**: the source text, or a whole answer: of its fenced blocks the largest that is Python is graded.
    **Reward**: the preset's; an infrastructure fault gives 0.0 here, because
    gymnasium has no "unknown", and ``info["masked"]`` is True: drop such a step from training.

    ``sizes="held-out"`` times (estimates) kernels on sizes for evaluation instead of the published ones.

    A preset with shaping (``fusion``, ``quantization``) pays it in one of two ways. With ``max_turns=1`` the reward is the
    preset's own, which hints at what a wrong kernel has right. With more turns it is the preset's ``base`` plus the potential-based
    ``info["shaping"]`` of the step (``rewards/shaping.py``, with ``gamma``), which adds up to 0 over every episode.

    **Episode end**: ``terminated`` when solved (correct, and on CUDA at least ``target`` times faster than eager),
    ``truncated`` after ``max_turns``. Rewards of the CPU and CUDA backends are not comparable.

    ``reset(seed=...)`` fixes the choice of the task. Grading inputs stay secret and fresh unless the env was made
    with ``grading_seed``. ``reset(options={"task": id})`` chooses the task.

    In vector form use ``vector_kwargs={"shared_memory": False}`` with ``AsyncVectorEnv``: gymnasium's shared
    memory cannot carry text (its observations stay garbage, silently).
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
        target: float = 1.0,
        targets: tuple[str, ...] = ("sm_90",),
        timing: bool = True,
        wall: float = 30.0,
        grading_seed: int | None = None,
        gamma: float = 1.0,
        render_mode: str | None = None,
        grade: Callable[..., Outcome] | None = None,
    ) -> None:
        from kbx_env.executor.direct import retrying
        from kbx_env.grading.grader import GRADINGS, TORCH_OPS, Grader, resolve_backend
        from kbx_env.grading.sizes import SIZES
        from kbx_env.rewards.compose import load_preset
        from kbx_env.rewards.shaping import Shaping

        if render_mode not in (None, "ansi"):
            raise UsageError(f"render_mode {render_mode!r}: accepted are None and 'ansi'")
        check_options(max_turns, wall, grading_seed, targets)
        if not isinstance(gamma, int | float) or not 0 <= gamma <= 1:
            raise UsageError(f"gamma is {gamma!r}; the learner's discount, from 0 to 1")
        if grading not in GRADINGS:
            raise UsageError(f"grading {grading!r}: accepted are {', '.join(GRADINGS)}")
        if torch_ops not in TORCH_OPS:
            raise UsageError(f"torch_ops {torch_ops!r}: accepted are {', '.join(TORCH_OPS)}")
        if sizes not in SIZES:
            raise UnknownName("sizes", sizes, SIZES)
        self.tasks: list[Task] = [load_task(task)] if task else load_tasks(category=category, split=split)
        self.backend = resolve_backend(backend)
        self.reward = load_preset(reward)
        self.split = "eval" if split == "eval" else "train"
        self.max_turns, self.grading, self.target = max_turns, grading, target
        self.render_mode = render_mode
        self._options: dict[str, Any] = {
            "backend": self.backend, "targets": tuple(targets), "grading": grading, "timing": timing,
            "split": self.split, "wall": wall, "seed": grading_seed, "estimate": self.reward.estimate,
            "torch_ops": torch_ops, "sizes": sizes,
        }  # fmt: skip
        self._grader = None if grade else Grader()
        self._grade = grade or retrying(self._grader.grade)  # type: ignore[union-attr]
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
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Begin an episode; ``options={"task": id}`` chooses its task.

        Raises:
            UsageError: unknown option or task.
        """
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
        """Grade a source.

        Raises:
            UsageError: called before ``reset``, or with something that is not text.
        """
        if self._task is None:
            raise UsageError("step before reset")
        if not isinstance(action, str):
            raise UsageError(f"the action is a {type(action).__name__}; it must be the source text (str)")
        outcome = self._grade(self._task.id, strip_fences(action), **self._options)
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
        """The state of the episode as text (``render_mode="ansi"``)."""
        if self.render_mode != "ansi" or self._task is None:
            return None
        last = "no submission yet"
        if self._outcome is not None:
            last = prompt.feedback(self._outcome)
            if self._outcome.verdict is Verdict.CORRECT:
                last = "solved\n" + last
        return f"{self._task.id} turn {self._turn}/{self.max_turns}\n{last}\n"

    def close(self) -> None:
        """End the sandbox."""
        if self._grader is not None:
            self._grader.close()


def check_options(max_turns: int, wall: float, grading_seed: int | None, targets: Sequence[str]) -> None:
    """What every env here is told.

    Raises:
        UsageError: a number out of range, or an unknown target.
    """
    from kbx_env.grading.grader import TARGETS

    if type(max_turns) is not int or max_turns < 1:
        raise UsageError(f"max_turns is {max_turns!r}; a whole number, at least 1")
    if not isinstance(wall, int | float) or not wall > 0:
        raise UsageError(f"wall is {wall!r}; seconds, more than 0")
    if grading_seed is not None and type(grading_seed) is not int:
        raise UsageError(f"grading_seed is {grading_seed!r}; a whole number, or None for secret inputs")
    for name in targets:
        if name not in TARGETS:
            raise UnknownName("target", name, TARGETS)
