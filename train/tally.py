"""What the episodes of a training step came to: the numbers of ``log.jsonl``, and a few of the texts in ``samples.jsonl``.

Rates are over episodes that are not masked; an episode counts by its best submission (right before wrong, then by reward).
"""

from __future__ import annotations

import json
import math
import os
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kbx_env.train import logs
from kbx_env.train.judge import Judge, Judged
from transformers import TrainerCallback

SAMPLES = "samples.jsonl"
MOST = 8000
"""Characters of a text that are kept, from its beginning and its end."""


@dataclass(frozen=True)
class Fact:
    """One episode in numbers; ``best`` is about its best submission. ``reward`` is ``None`` where it is masked."""

    task: str
    reward: float | None
    verdict: str
    compiled: bool
    correct: bool
    solved: bool
    speedup: float | None
    terms: Mapping[str, float | None]
    violations: Mapping[str, int]
    turns: int


def best_of(turns: Sequence[Judged]) -> Judged:
    """The best submission of an episode: unmasked before masked, right before wrong, then by reward."""
    return max(turns, key=lambda j: (j.base is not None, j.outcome.correct, j.base or 0.0))


def fact(task: str, turns: Sequence[Judged], reward: float | None) -> Fact:
    """An episode of at least one submission, with the reward that it was given."""
    best = best_of(turns)
    rules = Counter(v.rule for j in turns for v in j.outcome.violations)
    return Fact(
        task, reward, str(best.outcome.verdict), best.compiled, best.outcome.correct, any(j.solved for j in turns),
        best.outcome.speedup, best.terms, rules, len(turns),
    )  # fmt: skip


def summary(facts: Sequence[Fact]) -> dict[str, Any]:
    """The numbers of some episodes; what nothing is known of is ``None``.

    ``reward``, ``terms/NAME``: means. ``compile_rate``, ``correct_rate``, ``solved_rate``: shares of the unmasked episodes.
    ``masked``, ``violations/RULE``: counts. ``speedup``: geometric mean over right and timed ones. ``turns``: mean submissions.
    """
    known = [f for f in facts if f.reward is not None]
    speeds = [f.speedup for f in known if f.correct and f.speedup]
    names = sorted({n for f in facts for n in f.terms})
    rules = Counter[str]()
    for f in facts:
        rules.update(f.violations)
    return {
        "reward": _mean([f.reward for f in known]),
        "compile_rate": _mean([f.compiled for f in known]), "correct_rate": _mean([f.correct for f in known]),
        "solved_rate": _mean([f.solved for f in known]), "masked": len(facts) - len(known),
        "speedup": math.exp(statistics.fmean(map(math.log, speeds))) if speeds else None,
        "turns": _mean([f.turns for f in facts]),
        **{f"terms/{n}": _mean([v for f in known if (v := f.terms.get(n)) is not None]) for n in names},
        **{f"violations/{rule}": n for rule, n in sorted(rules.items())},
    }  # fmt: skip


def _mean(values: Sequence[Any]) -> float | None:
    return statistics.fmean(values) if values else None


class Tally(TrainerCallback):
    """Adds its numbers to every line of the log that tells of a training step.

    A line tells of the episodes that were played since the line before; where a step learns from episodes of an earlier one
    (``steps_per_generation``, ``num_iterations``) it repeats their numbers, with ``grading_seconds`` 0. It must be called before
    the callbacks that write: see ``first``.
    """

    def __init__(self, folder: str | Path, judge: Judge, shown: int = 4) -> None:
        """A tally.

        Args:
            folder: of the run.
            judge: counts gradings and their time.
            shown: texts of each step that are kept.
        """
        self._folder, self._judge, self._shown = Path(folder), judge, shown
        self._facts: list[Fact] = []
        self._line: dict[str, Any] = {}
        self._before, self._counted, self._seconds = 0, 0, 0.0

    def add(self, facts: Sequence[Fact], texts: Sequence[str], step: int) -> None:
        """Take the episodes of one generation, played at a training step (from 1)."""
        self._facts += facts
        if not _main():
            return
        # Evenly over the batch, which is sorted by task.
        some = range(0, len(facts), max(1, math.ceil(len(facts) / self._shown))) if self._shown else ()
        with (self._folder / SAMPLES).open("a", encoding="utf-8") as file:
            for i in some:
                f = facts[i]
                line = {"step": step, "task": f.task, "reward": f.reward, "verdict": f.verdict, "turns": f.turns,
                        "text": _bounded(texts[i])}  # fmt: skip
                file.write(json.dumps(line) + "\n")

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Go on counting from the step that training starts from, and drop what was kept after it."""
        earlier = [x for x in logs.read(self._folder) if x["step"] <= state.global_step] if state.global_step else []
        lines = [x for x in earlier if x.get("gradings") is not None]
        self._before = int(lines[-1]["gradings"]) if lines else 0
        if _main() and (path := self._folder / SAMPLES).is_file():
            kept = [line for line in path.read_text(encoding="utf-8").splitlines() if _step(line) <= state.global_step]
            part = path.with_suffix(".part")
            part.write_text("".join(line + "\n" for line in kept), encoding="utf-8")
            os.replace(part, path)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Add the numbers, in place: the writers come after."""
        if logs is None or "train_runtime" in logs or any(k.startswith("eval_") for k in logs):
            return
        facts, count = self._facts, self._judge.gradings - self._counted
        seconds = self._judge.seconds - self._seconds
        self._facts, self._counted, self._seconds = [], self._judge.gradings, self._judge.seconds
        if args.world_size > 1:
            from accelerate.utils import gather_object

            parts = gather_object([(facts, count, seconds)])
            facts = [f for part, _, _ in parts for f in part]
            count, seconds = sum(n for _, n, _ in parts), max(s for _, _, s in parts)
        if facts:
            self._line = summary(facts)
        self._before += count
        logs.update(self._line or summary([]))
        logs.update({"gradings": self._before, "grading_seconds": round(seconds, 3)})


def first(trainer: Any, tally: Tally) -> None:
    """Put a tally before all callbacks: mirrors that TRL adds itself would otherwise not see its numbers."""
    trainer.add_callback(tally)
    found = trainer.callback_handler.callbacks
    found.insert(0, found.pop(found.index(tally)))


def _main() -> bool:
    return os.environ.get("RANK", "0") == "0"


def _step(line: str) -> float:
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):  # cut off by a kill
        return math.inf


def _bounded(text: str) -> str:
    return text if len(text) <= MOST else f"{text[: MOST // 2]}\n... {len(text) - MOST} characters ...\n{text[-MOST // 2 :]}"
