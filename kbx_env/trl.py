"""Train with TRL's own trainers: prompts, a reward function, and an environment with a tool.

    from kbx_env.trl import KernelReward, prompts
    GRPOTrainer(model, reward_funcs=KernelReward("default"), train_dataset=prompts("train"), args=...)

``examples/trl_grpo.py`` is a whole script, ``docs/trainers.md`` has one for each way. ``train/grpo.py`` does more: several
turns with all gradings of a turn in parallel, credit for each turn, resuming without grading anything twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kbx_env.errors import UnknownName, UsageError
from kbx_env.options import resolve_backend
from kbx_env.spec.catalog import load_tasks
from kbx_env.train.batch_grader import GradedAnswer
from kbx_env.train.warm_grader import WarmGrader, shared

if TYPE_CHECKING:
    from collections.abc import Callable

    from datasets import Dataset

    Grade = Callable[[Sequence[tuple[str, str]]], list[GradedAnswer]]
    """From pairs of task and answer to graded answers, as ``KernelReward.grade``."""

PREFIX = "kernel/"
"""Begins the names of the metrics in TRL's log."""


def prompts(
    split: str = "train", category: str | None = None, *, tasks: str = "*", backend: str = "auto", system: str | None = None,
    template: str | None = None, repeats: int = 1, seed: int = 0,
) -> Dataset:  # fmt: skip
    """Return a dataset of prompts for TRL's trainers: ``prompt``, ``task``, ``seed``, ``category``, ``difficulty``.

    Args:
        split: ``train`` to train; ``eval`` to evaluate, which nothing should be trained on; ``all``.
        category: category of the tasks; ``None`` for all.
        tasks: globs over ids or names, comma-separated.
        backend: ``cpu``, ``cuda`` or ``auto``: the text says whether kernels are timed. Give it where another machine grades.
        system: a system message; ``None`` for none.
        template: text of the user's message with ``{instruction}``, or with ``{task}``, ``{entry}``, ``{signature}`` and
            ``{contract}``; ``None`` for the instruction alone.
        repeats: rows for each task.
        seed: seed of the column ``seed``.

    Returns:
        One row for each task and repeat. The prompt is a list of messages.

    Raises:
        UnknownName: no such split, category or backend, or no task matches.
        UsageError: a template that cannot be filled in, or ``repeats`` below 1.
    """
    from kbx_env.train import rows

    chosen = load_tasks(category=category, split=split, pattern=tasks)
    backend = resolve_backend(backend) if backend == "auto" else backend
    return rows.prompts(chosen, backend, repeats=repeats, seed=seed, system=system, template=template)


class KernelReward(WarmGrader):
    """A reward function for TRL: grades all answers of a batch in parallel, on workers that stay warm between calls.

    The reward of an answer is the value of a preset. It is ``None`` for an infrastructure fault: TRL leaves such an answer out
    where there is no other reward function.

    TRL logs the mean of every reward term as ``kernel/terms/NAME``, and ``kernel/compile_rate``, ``correct_rate``,
    ``solved_rate``, ``masked_rate`` and ``speedup``; its table of completions has a column for task, verdict and each term.

    The object can be pickled, as asynchronous trainers need it; a copy has workers of its own. Workers start with the first
    call or with ``start``, and end with ``close`` or with the object.
    """

    def __init__(self, preset: str = "default", backend: str = "auto", **options: Any) -> None:
        """Check the options; no worker starts yet.

        Args:
            preset: name of the preset, or ``python:module:attribute``.
            backend: ``cpu``, ``cuda``, or ``auto``: CUDA where there is a GPU; with ``url`` what the service has.
            **options: of ``kbx_env.train.batch_grader.BatchGrader``, such as ``url=`` and ``token=`` of a grading service,
                ``gpus=[...]`` that grade, ``workers``, ``timing``, ``target``, ``wall``, ``store``, ``executor``.
        """
        super().__init__(preset, backend, **options)
        self.__name__ = "kernel_reward"

    def __call__(
        self, prompts: Sequence[Any], completions: Sequence[Any], task: Sequence[str] | None = None, log_extra: Any = None,
        log_metric: Any = None, **columns: Any,
    ) -> Any:  # fmt: skip
        """Return the rewards of a batch, as TRL asks for them.

        Args:
            prompts: the prompts, one for each completion.
            completions: texts, or lists of messages; the last message is the answer.
            task: column ``task`` of the data: a task's id for each completion.
            log_extra: TRL's function that adds a column to its table of completions.
            log_metric: TRL's function that adds a number to its log.
            **columns: the other columns, not used.

        Returns:
            A reward for each completion; ``None`` where the grading is masked.

        Raises:
            UsageError: the data has no column ``task``.
        """
        answers = answers_of(prompts, completions, task)
        return _logged(answers, self.grade(answers), log_extra, log_metric)


class AsyncKernelReward(KernelReward):
    """``KernelReward`` as an ``async`` function: TRL then runs it at the same time as other asynchronous reward functions."""

    async def __call__(
        self, prompts: Sequence[Any], completions: Sequence[Any], task: Sequence[str] | None = None, log_extra: Any = None,
        log_metric: Any = None, **columns: Any,
    ) -> list[float | None]:  # fmt: skip
        """Return the rewards of a batch; the arguments are those of ``KernelReward``.

        Args:
            prompts: the prompts.
            completions: the completions.
            task: column ``task`` of the data.
            log_extra: TRL's function for its table.
            log_metric: TRL's function for its log.
            **columns: the other columns, not used.

        Returns:
            A reward for each completion; ``None`` where the grading is masked.
        """
        answers = answers_of(prompts, completions, task)
        return _logged(answers, await self.agrade(answers), log_extra, log_metric)


def answers_of(prompts: Sequence[Any], completions: Sequence[Any], task: Sequence[str] | None) -> list[tuple[str, str]]:
    """Return pairs of task and answer.

    Args:
        prompts: the prompts; without ``task`` their last messages have a key ``task``, as ``prompts`` makes them.
        completions: texts or lists of messages.
        task: a task's id for each completion.

    Returns:
        The pairs.

    Raises:
        UsageError: the task of a completion is not known.
    """
    if task is None:
        task = [p[-1].get("task", "") if isinstance(p, list) else "" for p in prompts]
    if not all(task):
        raise UsageError("the data has no column 'task' with the id of each row's task; make it with kbx_env.trl.prompts()")
    return list(zip(task, map(answer_of, completions), strict=True))


def answer_of(completion: Any) -> str:
    """Return the text of a completion: itself, or the content of its last message."""
    if isinstance(completion, str):
        return completion
    content = completion[-1].get("content") if completion else None
    if isinstance(content, list):  # parts, as tokenizers of models for several media write them
        return "".join(str(part.get("text") or "") for part in content)
    return content or ""


def _logged(
    answers: Sequence[tuple[str, str]], graded: Sequence[GradedAnswer], log_extra: Any, log_metric: Any
) -> list[float | None]:  # fmt: skip
    """Log a batch by TRL's functions, where it passes them, and return the rewards."""
    from kbx_env.train.step_metrics import episode_stats, summary

    if log_metric is not None:
        line = summary([episode_stats(task, [j], j.reward) for (task, _), j in zip(answers, graded, strict=True)])
        line["masked_rate"] = line["masked"] / len(graded) if graded else None
        for name, value in line.items():
            if value is not None and (name.startswith("terms/") or name.endswith("_rate") or name == "speedup"):
                log_metric(PREFIX + name, float(value))
    if log_extra is not None:
        log_extra("task", [task for task, _ in answers])
        log_extra("verdict", [str(j.outcome.verdict) for j in graded])
        for name in sorted({name for j in graded for name in j.terms}):
            log_extra(name, [j.terms.get(name) for j in graded])
    return [j.reward for j in graded]


class KernelTools:
    """An episode in which the model submits kernels by a tool call: TRL's ``environment_factory=KernelTools``.

    For another preset, backend or number of turns: ``functools.partial(KernelTools, KernelReward("fusion"), max_turns=2)``. All
    environments of one ``KernelReward`` share its workers. TRL makes the calls one after another.
    """

    def __init__(self, reward: WarmGrader | Grade | None = None, max_turns: int = 4, episode: str = "best") -> None:
        """An environment without an episode.

        Args:
            reward: grades and pays the submissions; by default one ``KernelReward()`` for all environments of the process.
            max_turns: submissions of an episode.
            episode: which submission is paid, ``best`` or ``last``.

        Raises:
            UsageError: ``max_turns`` is below 1.
            UnknownName: no such ``episode``.
        """
        from kbx_env.train.rollout import EPISODES

        if max_turns < 1:
            raise UsageError(f"max_turns is {max_turns}; at least 1")
        if episode not in EPISODES:
            raise UnknownName("episode", episode, EPISODES)
        reward = shared() if reward is None else reward
        self._grade: Grade = reward.grade if isinstance(reward, WarmGrader) else reward
        self._max_turns, self._episode = max_turns, episode
        self._task, self._turns = "", list[GradedAnswer]()

    def reset(self, task: str = "", **row: Any) -> None:
        """Start an episode.

        Args:
            task: the task's id.
            **row: the other columns of the row of data, which are not used.

        Raises:
            UsageError: the row has no task.
        """
        if not task:
            raise UsageError("the data has no column 'task' with the id of each row's task; make it with kbx_env.trl.prompts()")
        self._task, self._turns = task, []

    def submit(self, source: str) -> str:
        """Compile, check and time a kernel.

        Args:
            source: The whole Python module that defines the task's function.

        Returns:
            The verdict, with what to do next.
        """
        if len(self._turns) >= self._max_turns:
            return "No submission is left."
        (graded,) = self._grade([(self._task, source)])
        self._turns.append(graded)
        return "Solved. Nothing more is needed." if graded.solved else graded.feedback

    def get_reward(self) -> float | None:
        """Return the reward of the episode; ``None`` where every grading is masked.

        An episode without a submission counts as one empty submission.
        """
        from kbx_env.train.rollout import episode_reward

        if not self._turns:
            self._turns += self._grade([(self._task, "")])
        return episode_reward(self._turns, self._episode, self._max_turns > 1)
