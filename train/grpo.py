"""GRPO with TRL: a model answers tasks of the train split, its kernels are graded, and it learns from their rewards.

    python train/grpo.py train/configs/grpo.yaml model=runs/sft/final out=runs/grpo
    python train/grpo.py runs/grpo/settings.yaml resume=last

``out/final`` is a checkpoint for ``eval/report.py --policy hf:out/final``. ``out/log.jsonl`` has a line for every step,
``out/samples.jsonl`` some of the answers, ``out/gradings.sqlite`` every grading, so that a resumed run grades nothing twice.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kbx_env.train import grpo_setup as setup
from kbx_env.train.grpo_settings import Settings as Settings
from kbx_env.train.runs import checkpoint_of, train
from kbx_env.train.settings import command, save

from kbx_env.errors import UsageError

if TYPE_CHECKING:
    from kbx_env.outcome import Outcome


def trainer_of(s: Settings, stack: contextlib.ExitStack, grade: Callable[..., Outcome] | None = None) -> Any:
    """Return the trainer of a run, after all checks and before any step.

    Args:
        s: the settings.
        stack: closes the grader at its end.
        grade: replaces the real grader in tests.

    Returns:
        The trainer.

    Raises:
        UsageError: settings, model or tasks that cannot be used.
    """
    setup.check(s)
    tasks = setup.tasks_of(s)
    config, adapter = setup.config_of_run(s), setup.adapter_of(s.lora)
    setup.check_model(s, config)
    grader = stack.enter_context(setup.grader_of(s, grade))  # its workers start while the model is read
    model, tokenizer = setup.load(s, config)
    data = setup.rows_of(s, tasks, grader.backend, config, model, tokenizer)
    held = setup.eval_rows_of(s, grader.backend, config, model, tokenizer)
    return setup.assemble(s, config, model, tokenizer, adapter, data, grader, eval_data=held)


def run(
    s: Settings, grade: Callable[..., Outcome] | None = None, trainer_of: Callable[..., Any] = trainer_of
) -> None:  # fmt: skip
    """Train and write ``out/final``.

    Args:
        s: the settings.
        grade: replaces the real grader in tests.
        trainer_of: makes the trainer.
    """
    out = Path(s.out)
    # The other processes of a distributed run do not check: the first one may already write to the folder.
    checkpoint = checkpoint_of(s.out, s.resume) if s.resume or os.environ.get("RANK", "0") == "0" else None
    with contextlib.ExitStack() as stack:
        trainer = _checked(s, stack, grade, trainer_of)
        if trainer.is_world_process_zero():
            save(s, out)
        train(trainer, checkpoint, s, setup.prompting_of(s))


def _checked(
    s: Settings, stack: contextlib.ExitStack, grade: Callable[..., Outcome] | None, trainer_of: Callable[..., Any]
) -> Any:
    """Make the trainer; after a usage error remove the new folder, or the next try would find it not empty."""
    out = Path(s.out)
    fresh = s.resume is None and not (out.is_dir() and any(out.iterdir()))
    try:
        return trainer_of(s, stack, grade)
    except UsageError:
        stack.close()
        if fresh:
            shutil.rmtree(out, ignore_errors=True)
        raise


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; exit status 0 when trained, 2 on bad usage, 130 when interrupted: continue with ``resume=last``."""
    return command("grpo.py", Settings, __doc__, run, argv)


if __name__ == "__main__":
    sys.exit(main())
