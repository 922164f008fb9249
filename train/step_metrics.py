"""Metrics of the episodes of a training step for ``log.jsonl``, and some of their texts for ``samples.jsonl``.

Rates are over episodes that are not masked. An episode counts by its best submission (correct before wrong, then by reward).
"""

from __future__ import annotations

import contextlib
import math
import os
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kbx_env.train import logs
from kbx_env.train.batch_grader import BatchGrader, GradedAnswer
from transformers import TrainerCallback

from kbx_env import jsonl

SAMPLES = "samples.jsonl"
"""File of texts, in the folder of a run."""
MOST = 8000
"""Characters of a text that are kept: half of them from its beginning, half from its end."""


@dataclass(frozen=True)
class EpisodeStats:
    """One episode in numbers. Verdict, ``compiled``, ``correct``, ``speedup`` and ``terms`` are those of its best submission."""

    task: str
    reward: float | None
    """``None`` where the episode is masked."""
    verdict: str
    compiled: bool
    correct: bool
    solved: bool
    """Whether any submission solved the task."""
    speedup: float | None
    terms: Mapping[str, float | None]
    violations: Mapping[str, int]
    """Violations of all submissions, by rule."""
    turns: int
    """Number of submissions."""


def best_of(turns: Sequence[GradedAnswer]) -> GradedAnswer:
    """Return the best submission of an episode: unmasked before masked, correct before wrong, then by reward."""
    return max(turns, key=lambda j: (j.base is not None, j.outcome.correct, j.base or 0.0))


def episode_stats(task: str, turns: Sequence[GradedAnswer], reward: float | None) -> EpisodeStats:
    """Return the numbers of an episode.

    Args:
        task: the task's id.
        turns: its submissions, at least one.
        reward: the reward of the episode; ``None`` where it is masked.

    Returns:
        The numbers.
    """
    best = best_of(turns)
    rules = Counter(v.rule for j in turns for v in j.outcome.violations)
    return EpisodeStats(
        task, reward, str(best.outcome.verdict), best.compiled, best.outcome.correct, any(j.solved for j in turns),
        best.outcome.speedup, best.terms, rules, len(turns),
    )  # fmt: skip


def summary(episodes: Sequence[EpisodeStats]) -> dict[str, Any]:
    """Return the metrics of some episodes, as the keys of a line of ``log.jsonl``; ``None`` where no episode has a value.

    ``reward``, ``terms/NAME``: means. ``compile_rate``, ``correct_rate``, ``solved_rate``: shares of the unmasked episodes.
    ``masked``, ``violations/RULE``: counts. ``speedup``: geometric mean over correct, timed episodes. ``turns``: mean number of
    submissions.
    """
    known = [f for f in episodes if f.reward is not None]
    speeds = [f.speedup for f in known if f.correct and f.speedup]
    names = sorted({n for f in episodes for n in f.terms})
    rules = Counter[str]()
    for f in episodes:
        rules.update(f.violations)
    return {
        "reward": _mean([f.reward for f in known]),
        "compile_rate": _mean([f.compiled for f in known]), "correct_rate": _mean([f.correct for f in known]),
        "solved_rate": _mean([f.solved for f in known]), "masked": len(episodes) - len(known),
        "speedup": math.exp(statistics.fmean(map(math.log, speeds))) if speeds else None,
        "turns": _mean([f.turns for f in episodes]),
        **{f"terms/{n}": _mean([v for f in known if (v := f.terms.get(n)) is not None]) for n in names},
        **{f"violations/{rule}": n for rule, n in sorted(rules.items())},
    }  # fmt: skip


def _mean(values: Sequence[Any]) -> float | None:
    return statistics.fmean(values) if values else None


class StepMetrics(TrainerCallback):
    """A callback that adds metrics to every line of the log about a training step.

    A line is about the episodes since the line before. Where a step learns from episodes of an earlier one
    (``steps_per_generation``, ``num_iterations``), it repeats their metrics, with ``grading_seconds`` 0. It must be called before
    the callbacks that write: see ``insert_first``.
    """

    def __init__(self, folder: str | Path, grader: BatchGrader, shown: int = 4) -> None:
        """Metrics of one run.

        Args:
            folder: folder of the run.
            grader: counts gradings and their time.
            shown: texts of each step that are kept.
        """
        self._folder, self._grader, self._shown = Path(folder), grader, shown
        self._episodes: list[EpisodeStats] = []
        self._line: dict[str, Any] = {}
        self._before, self._counted, self._seconds = 0, 0, 0.0
        self._evaluates, self._held = False, list[EpisodeStats]()

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """Count the episodes of a ``with`` block as those of an evaluation: they are in its line of the log alone."""
        self._evaluates, self._held = True, []
        try:
            yield
        finally:
            self._evaluates = False

    def add(self, episodes: Sequence[EpisodeStats], texts: Sequence[str], step: int) -> None:
        """Add the episodes of one generation, and write some of their texts.

        Args:
            episodes: their numbers.
            texts: their texts, in the same order.
            step: the training step at which they were played, from 1.
        """
        (self._held if self._evaluates else self._episodes).extend(episodes)
        if not _main() or self._evaluates:
            return
        # Evenly over the batch, which is sorted by task.
        some = range(0, len(episodes), max(1, math.ceil(len(episodes) / self._shown))) if self._shown else ()
        with (self._folder / SAMPLES).open("a", encoding="utf-8") as file:
            for i in some:
                f = episodes[i]
                line = {"step": step, "task": f.task, "reward": f.reward, "verdict": f.verdict, "turns": f.turns,
                        "text": _bounded(texts[i])}  # fmt: skip
                file.write(jsonl.encode(line))

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Continue counting at the step that training starts from, and drop the texts of later steps."""
        earlier = [x for x in logs.read(self._folder) if x["step"] <= state.global_step] if state.global_step else []
        lines = [x for x in earlier if x.get("gradings") is not None]
        self._before = int(lines[-1]["gradings"]) if lines else 0
        if _main() and (path := self._folder / SAMPLES).is_file():
            kept = [line for n, line in jsonl.numbered(path) if _step(path, n, line) <= state.global_step]
            part = path.with_suffix(".part")
            part.write_text("".join(line + "\n" for line in kept), encoding="utf-8")
            os.replace(part, path)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Add the metrics to ``logs`` in place: the callbacks that write it come after this one."""
        if logs is not None and any(k.startswith("eval_") for k in logs):
            self._log_evaluation(args, logs)
            return
        if logs is None or "train_runtime" in logs:
            return
        episodes, count = self._episodes, self._grader.gradings - self._counted
        seconds = self._grader.seconds - self._seconds
        self._episodes, self._counted, self._seconds = [], self._grader.gradings, self._grader.seconds
        if args.world_size > 1:
            from accelerate.utils import gather_object

            parts = gather_object([(episodes, count, seconds)])
            episodes = [f for part, _, _ in parts for f in part]
            count, seconds = sum(n for _, n, _ in parts), max(s for _, _, s in parts)
        if episodes:
            self._line = summary(episodes)
        self._before += count
        logs.update(self._line or summary([]))
        logs.update({"gradings": self._before, "grading_seconds": round(seconds, 3)})


    def _log_evaluation(self, args: Any, logs: dict[str, Any]) -> None:
        """Add the metrics of an evaluation. Its gradings are not among those of training, by which runs are compared."""
        episodes, count = self._held, self._grader.gradings - self._counted
        self._held, self._counted, self._seconds = [], self._grader.gradings, self._grader.seconds
        if args.world_size > 1:
            from accelerate.utils import gather_object

            parts = gather_object([(episodes, count)])
            episodes, count = [f for part, _ in parts for f in part], sum(n for _, n in parts)
        logs.update({f"eval_{name}": value for name, value in summary(episodes).items()})
        logs["eval_gradings"] = count


def insert_first(trainer: Any, metrics: StepMetrics) -> None:
    """Put the metrics before all callbacks: those that TRL adds itself, such as wandb's, would otherwise not see them."""
    trainer.add_callback(metrics)
    found = trainer.callback_handler.callbacks
    found.insert(0, found.pop(found.index(metrics)))


def _main() -> bool:
    """Return whether this is the only or the first process of the run."""
    return os.environ.get("RANK", "0") == "0"


def _step(path: Path, number: int, line: str) -> float:
    try:
        return float(jsonl.parse(path, number, line)["step"])
    except (ValueError, KeyError, TypeError):  # an incomplete line, of a run that was killed
        return math.inf


def _bounded(text: str) -> str:
    return text if len(text) <= MOST else f"{text[: MOST // 2]}\n... {len(text) - MOST} characters ...\n{text[-MOST // 2 :]}"
