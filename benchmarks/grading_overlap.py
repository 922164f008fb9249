"""The stall of a training step: how long the trainer waits for gradings, with gradings begun as answers end and without.

    python benchmarks/grading_overlap.py out=runs/overlap
    python benchmarks/grading_overlap.py seconds=2 steps=6 workers=4 out=runs/overlap-2s

A tiny model on a CPU answers each prompt with a different length: its end token is drawn at its real probability, and answers
that do not end are cut off at ``tokens``. A grading is a pause of ``seconds`` in one of ``workers`` threads, so that the figures
do not depend on the machine's cores; generation is slowed down to ``pace`` seconds a token, as of a larger model. ``stall`` is the
time between the end of generation and the rewards. ``out/overlap.json`` has the numbers.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # run as a script
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from kbx_env.train import grpo, grpo_trainer, logs, models
from kbx_env.train.settings import MISSING, command, read

from kbx_env.outcome import Cases, Evidence, Fault, Outcome, Stage, Verdict


@dataclass
class Settings:
    """Settings of this script."""

    out: str = MISSING
    """Folder for the model, two runs and overlap.json."""
    steps: int = 4
    """Updates of each run."""
    prompts: int = 2
    """Tasks of a step."""
    answers: int = 8
    """Answers to each task."""
    tokens: int = 200
    """Tokens of an answer at most."""
    pace: float = 0.02
    """Seconds of generating one token of all answers, at least."""
    seconds: float = 1.0
    """Seconds of one grading."""
    workers: int = 4
    """Gradings at a time."""
    ends: float = 0.02
    """Probability that an answer ends at a token, about."""


def grade_after(seconds: float) -> Any:
    """Return a grader that pauses.

    Args:
        seconds: the pause.

    Returns:
        A function as ``kbx_env.grade``; half of the sources pass half of their cases.
    """

    def grade(task: str, source: bytes, **options: Any) -> Outcome:
        time.sleep(seconds)
        passed = 5 * (len(source) % 2)
        return Outcome(task, Verdict.INCORRECT, Stage.CORRECT, "cpu", "contract", Fault.POLICY, "wrong",
                       cases=Cases(passed, 10, (), passed, 10), evidence=Evidence(1))  # fmt: skip

    return grade


class _Pace:
    """A stopping criterion that stops nothing and waits at every token."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        import torch

        time.sleep(self._seconds)
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


def _slowed(trainer: Any, s: Settings) -> None:
    """Slow down generation, and raise the probability that an answer ends to about ``ends``."""
    import math

    import torch
    from transformers import LogitsProcessorList, StoppingCriteriaList

    model = trainer.model
    generate, end = model.generate, trainer.eos_token_ids[0]

    def bias(input_ids: Any, scores: Any) -> Any:
        others = torch.cat((scores[:, :end], scores[:, end + 1 :]), 1).logsumexp(1)
        scores[:, end] = others + math.log(s.ends / (1 - s.ends))
        return scores

    def slow(*args: Any, **kwargs: Any) -> Any:
        criteria = StoppingCriteriaList([*(kwargs.pop("stopping_criteria", None) or []), _Pace(s.pace)])
        return generate(*args, stopping_criteria=criteria, logits_processor=LogitsProcessorList([bias]), **kwargs)

    model.generate = slow


def measured(s: Settings, model: Path, overlap: bool) -> dict[str, Any]:
    """Train, and return the mean seconds of a step after the first.

    Args:
        s: the settings.
        model: the checkpoint.
        overlap: whether gradings begin as answers end.

    Returns:
        ``step``, ``stall`` and ``early`` (gradings begun early, in all).
    """
    out = Path(s.out) / ("with" if overlap else "without")
    settings = read(grpo.Settings, [
        f"model={model}", f"out={out}", "tasks=logspace,erfc_sqrt", "backend=cpu", f"workers={s.workers}", f"overlap={overlap}",
        f"trainer.max_steps={s.steps}", f"trainer.num_generations={s.answers}", "trainer.use_cpu=true", "trainer.disable_tqdm=true",
        f"trainer.per_device_train_batch_size={s.prompts * s.answers}", f"trainer.max_completion_length={s.tokens}",
        "trainer.mask_truncated_completions=false", "trainer.save_steps=1000",
    ])  # fmt: skip
    found: list[Any] = []

    def trainer_of(settings: grpo.Settings, stack: Any, grade: Any) -> grpo_trainer.KernelTrainer:
        trainer: grpo_trainer.KernelTrainer = grpo.trainer_of(settings, stack, grade)
        _slowed(trainer, s)
        found.append(trainer)
        return trainer

    grpo.run(settings, grade_after(s.seconds), trainer_of)
    lines = [x for x in logs.read(out) if "train_runtime" not in x]
    counted = lines[1:] or lines
    return {
        "step": round(statistics.fmean(x["step_time"] for x in counted), 3),
        "stall": round(statistics.fmean(x["grading_seconds"] for x in counted), 3),
        "early": found[0].watch.begun if found[0].watch is not None else 0,
        "lengths": [x["completions/mean_length"] for x in counted],
    }


def run(s: Settings) -> None:
    """Measure both, and write ``overlap.json``.

    Args:
        s: the settings.
    """
    model = models.build(models.Build(str(Path(s.out) / "model"), hidden=32, layers=1, heads=2, vocab=600, context=4096))
    result = {**vars(s), "without": measured(s, model, False), "with": measured(s, model, True)}
    path = Path(s.out) / "overlap.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    for name in ("without", "with"):
        print(f"{name:8} a step takes {result[name]['step']:.2f} s, of which it waits {result[name]['stall']:.2f} s for gradings")
    print(f"result: {path}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; exit status 0 when done, 2 on bad usage, 130 when interrupted."""
    return command("grading_overlap.py", Settings, __doc__ or "", run, argv)


if __name__ == "__main__":
    sys.exit(main())
