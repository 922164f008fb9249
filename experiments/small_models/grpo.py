"""GRPO of a small model whose answers the chat template may begin.

    python experiments/small_models/grpo.py CONFIG.yaml model=runs/small/sft/final out=runs/small/grpo

As ``train/grpo.py``, but the grader is given whole answers. Also for ``train/compare_rewards.py --learner``.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if __package__ in (None, ""):  # run as a script
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from kbx_env.train import grpo
from kbx_env.train import grpo_setup as setup
from kbx_env.train.settings import command

from experiments.small_models.answer_prefix import AnswerPrefix, PrefixedGrader, PrefixedMetrics
from kbx_env.errors import UsageError

if TYPE_CHECKING:
    from kbx_env.outcome import Outcome

Settings = grpo.Settings


def load(s: Settings, config: Any) -> tuple[Any, Any]:
    """Check and load model and tokenizer; see ``grpo_setup.check_model`` and ``grpo_setup.load``.

    Args:
        s: the settings.
        config: the ``trl.GRPOConfig`` of the run.

    Returns:
        The model and its tokenizer.

    Raises:
        UsageError: the template begins answers, so that no tool can be called, or ``grpo_setup`` refuses the checkpoint.
    """
    setup.check_model(s, config)
    model, tokenizer = setup.load(s, config)
    if s.mode == "tool" and AnswerPrefix(tokenizer):
        raise UsageError(f"{s.model}: its template begins every answer with code, so that no tool can be called; use mode=single")
    return model, tokenizer


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
    model, tokenizer = load(s, config)
    grader = stack.enter_context(setup.grader_of(s, grade))
    data = setup.rows_of(s, tasks, grader.backend, config, model, tokenizer)
    prefix = AnswerPrefix(tokenizer, grader.backend)
    whole: Any = PrefixedGrader(grader, prefix)
    metrics = PrefixedMetrics(s.out, grader, s.samples, prefix)
    return setup.assemble(s, config, model, tokenizer, adapter, data, whole, metrics)


def run(s: Settings) -> None:
    """Train and write ``out/final``."""
    grpo.run(s, trainer_of=trainer_of)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; exit status 0 when trained, 2 on bad usage, 130 when interrupted: continue with ``resume=last``."""
    return command("grpo.py", Settings, __doc__, run, argv)


if __name__ == "__main__":
    sys.exit(main())
