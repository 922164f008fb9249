"""Answers whose beginning the chat template writes: the imports and the line that defines the entry function.

A model with such a template (``build_model.py answer=begun``) generates the rest only. What is graded and recorded must be the
whole answer, so the grader and the metrics of a training run put the beginning in front of each generated text.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kbx_env.baselines.llm.conversation import Conversation
from kbx_env.train import rows
from kbx_env.train.batch_grader import BatchGrader, GradedAnswer
from kbx_env.train.step_metrics import EpisodeStats, StepMetrics

from experiments.small_models.compact import HEAD
from kbx_env.errors import UsageError
from kbx_env.spec.catalog import load_task, load_tasks

TEMPLATE = """\
{%- if add_generation_prompt %}
    {%- set asked = messages | selectattr("role", "equalto", "user") | first %}
    {%- if asked is defined and asked.content is string and "\\n\\nSignature\\n    " in asked.content %}
        {{- "```python\\nHEAD\\ndef " }}
        {{- asked.content.split("\\n\\nSignature\\n    ")[1].split("\\n\\nContract\\n")[0] + ":\\n" }}
    {%- endif %}
{%- endif %}""".replace("HEAD", HEAD.replace("\n", "\\n"))
"""Appended to a chat template: begins each answer to an instruction of kbx_env as all compact demonstrations begin."""


def check_template(tokenizer: Any, name: str) -> None:
    """Check that prompt and answer together begin with the prompt; else a model is trained on prompts that it is never given.

    Args:
        tokenizer: a tokenizer with ``TEMPLATE``.
        name: name of the template before that.

    Raises:
        UsageError: the template shows earlier answers in another way.
    """
    messages = [rows.message(load_tasks(split="train")[0], "cpu")]
    prefix = Conversation(tokenizer).begun(messages)
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    whole = tokenizer.apply_chat_template([*messages, {"role": "assistant", "content": f"{prefix}    pass"}], tokenize=False)
    if not prefix or not whole.startswith(prompt):
        raise UsageError(f"answer=begun does not go with template={name}: earlier answers are shown otherwise")


class AnswerPrefix:
    """The text with which a tokenizer's chat template begins the answers to a task; empty with other templates."""

    def __init__(self, tokenizer: Any, backend: str = "cpu") -> None:
        """Prefixes of one tokenizer.

        Args:
            tokenizer: the tokenizer.
            backend: ``cpu`` or ``cuda``: the instruction that the model is given.
        """
        self._conversation, self._backend = Conversation(tokenizer), backend
        self._of = functools.cache(self._text)

    def _text(self, task: str) -> str:
        return self._conversation.begun([rows.message(load_task(task), self._backend)])

    def __call__(self, task: str) -> str:
        """Return the prefix of answers to a task, given by its id; empty for an unknown task."""
        try:
            return self._of(task)
        except UsageError:  # the grader masks such an answer
            return ""

    def __bool__(self) -> bool:
        """Whether the template begins answers at all."""
        return bool(self(load_tasks(split="train")[0].id))


class PrefixedGrader:
    """A ``BatchGrader`` for models whose answers the template begins."""

    def __init__(self, grader: BatchGrader, prefix: AnswerPrefix) -> None:
        """Wrap a grader.

        Args:
            grader: grades whole answers.
            prefix: what is put in front of generated texts.
        """
        self._grader, self._prefix = grader, prefix

    def __call__(self, answers: Sequence[tuple[str, str]]) -> list[GradedAnswer]:
        """Grade pairs of a task's id and a generated text, in their order."""
        return self._grader([(task, self._prefix(task) + text) for task, text in answers])

    def __getattr__(self, name: str) -> Any:
        """Counts and options are the wrapped grader's."""
        return getattr(self._grader, name)


class PrefixedMetrics(StepMetrics):
    """``StepMetrics`` whose samples.jsonl holds whole answers."""

    def __init__(self, folder: str | Path, grader: Any, shown: int, prefix: AnswerPrefix) -> None:
        """Metrics of one run.

        Args:
            folder: folder of the run.
            grader: counts gradings and their time.
            shown: texts of each step that are kept.
            prefix: what is put in front of generated texts.
        """
        super().__init__(folder, grader, shown)
        self._prefix = prefix

    def add(self, episodes: Sequence[EpisodeStats], texts: Sequence[str], step: int) -> None:
        """Add the episodes of one generation; see ``StepMetrics.add``."""
        super().add(episodes, [self._prefix(e.task) + text for e, text in zip(episodes, texts, strict=True)], step)
