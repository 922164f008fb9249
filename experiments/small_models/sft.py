"""Supervised fine-tuning of a small model whose answers the chat template may begin.

    python experiments/small_models/sft.py experiments/small_models/sft.yaml

As ``train/sft.py``. First it checks that the demonstrations begin as the template begins answers.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # run as a script
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from kbx_env.baselines.llm.conversation import Conversation
from kbx_env.train import models, rows, sft
from kbx_env.train.settings import command

from experiments.small_models.answer_prefix import AnswerPrefix
from kbx_env.errors import UsageError

Settings = sft.Settings


def trainer_of(s: Settings) -> Any:
    """Return the trainer of a run; see ``train/sft.py``.

    Args:
        s: the settings.

    Returns:
        A ``trl.SFTTrainer``.

    Raises:
        UsageError: the demonstrations do not begin as the template begins answers, or ``train/sft.py`` refuses the settings.
    """
    check_beginnings(s)
    return sft.trainer_of(s)


def check_beginnings(s: Settings) -> None:
    """Check that each demonstration begins as the chat template begins answers: that part is not learnt.

    Args:
        s: the settings.

    Raises:
        UsageError: a row that begins otherwise; names it, counted from 1.
    """
    tokenizer = models.tokenizer_for(s.model)
    if not AnswerPrefix(tokenizer):
        return
    data, conversation = rows.only(rows.load(s.data), category=s.category, pattern=s.tasks), Conversation(tokenizer)
    if not {"prompt", "completion"} <= set(data.column_names):
        return  # train/sft.py names the column
    for number, (prompt, completion) in enumerate(zip(data["prompt"], data["completion"], strict=True), 1):
        prefix = conversation.begun(prompt)
        if not completion[0]["content"].startswith(prefix):
            raise UsageError(
                f"{s.data}: row {number} does not begin as the chat template of {s.model} begins every answer "
                f"({prefix[:40]!r}...); make demonstrations with experiments/small_models/data.py style=compact, or the model with "
                "answer=free"
            )


def run(s: Settings) -> None:
    """Train and write ``out/final``."""
    check_beginnings(s)
    sft.run(s)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; exit status 0 when trained, 2 on bad usage, 130 when interrupted: continue with ``resume=last``."""
    return command("sft.py", Settings, __doc__, run, argv)


if __name__ == "__main__":
    sys.exit(main())
