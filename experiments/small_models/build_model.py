"""Build a small model with random weights whose tokenizer, prompt and answers may be shortened.

    python experiments/small_models/build_model.py out=runs/small/model hidden=384 layers=6 heads=6 vocab=4096 context=1024 \\
        tokens=lines prompt=short answer=begun

Has the settings of ``train/build_model.py`` and those that only experiments need.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # run as a script
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from kbx_env.train import models, rows
from kbx_env.train.settings import command, save

from experiments.small_models import answer_prefix
from experiments.small_models.compact import compact
from experiments.small_models.line_tokens import lines_tokenizer, only_used, shortening
from kbx_env.envs.prompt import instruction
from kbx_env.errors import UnknownName, UsageError
from kbx_env.spec.catalog import expert_source, load_tasks, splits

TOKENS, PROMPTS, ANSWERS = ("words", "lines"), ("full", "short"), ("free", "begun")
_FRAME = f"<|im_start|>system\nuser\nassistant\n{models.END}\n"
"""The text that chat templates put around messages."""


@dataclass
class Build(models.Build):
    """Settings of this script."""

    tokens: str = "words"
    """lines: frequent whole lines of code are one token (line_tokens.py); train it on demonstrations with style=compact."""
    prompt: str = "full"
    """short: the tokenizer leaves out the rules and all but the first paragraph of the contract; only with tokens=lines."""
    answer: str = "free"
    """begun: the chat template begins every answer with the imports and the line that defines the entry function; the model
    generates the rest. Only with tokens=lines; train it on demonstrations with style=compact, with the scripts in this folder.
    Not with mode=tool. Answers of a model server lack the beginning: evaluate such a checkpoint as hf:FOLDER."""
    data: str | None = None
    """Demonstrations whose lines become tokens too, only with tokens=lines. Answers like them are then a few tokens a line. All
    other tokens are left out, so that a model that learns only these demonstrations is small and fast."""


def build(b: Build) -> Path:
    """Write a checkpoint; see ``train/models.py``.

    Args:
        b: the settings.

    Returns:
        The folder.

    Raises:
        UsageError: settings that do not fit each other, or ``data`` that holds no demonstrations of the train split.
        UnknownName: no such option or template.
    """
    for kind, value, known in (("tokens", b.tokens, TOKENS), ("prompt", b.prompt, PROMPTS), ("answer", b.answer, ANSWERS)):
        if value not in known:
            raise UnknownName(kind, value, known)
    if b.tokens == "lines":
        return models.build(b, lambda template: _tokenizer(b, template))
    if b.prompt == "short":
        raise UsageError("prompt=short is done by the tokenizer of tokens=lines; give both")
    if b.answer == "begun":
        raise UsageError("answer=begun needs tokens=lines: other tokens span the end of the text that the template writes")
    if b.data is not None:
        raise UsageError(f"data={b.data} is for the lines of demonstrations; give tokens=lines with it")
    return models.build(b)


def _tokenizer(b: Build, template: str) -> Any:
    # The time of the last change is part of the cache's key: the file may be written anew.
    written = Path(b.data).stat().st_mtime_ns if b.data is not None and Path(b.data).exists() else 0
    core = _lines_core(b.prompt, b.vocab - len(models.ADDED_TOKENS), b.data, written)
    if b.answer != "begun":
        return models.wrapped(core, template, b.context)
    tokenizer = models.wrapped(core, f"{template}\n{answer_prefix.TEMPLATE}", b.context)
    answer_prefix.check_template(tokenizer, b.template)
    return tokenizer


@functools.cache
def _lines_core(prompt: str, vocab: int, data: str | None, written: int) -> str:
    """Train a tokenizer of whole lines and return it as JSON. Cached, since it takes some seconds."""
    short = shortening(load_tasks(split="train")[0]) if prompt == "short" else ()
    shown = [] if data is None else _messages(data)
    core = lines_tokenizer([*("\n".join(row) for row in shown), *_kernels()], vocab, models.SPECIAL_TOKENS, short)
    return str((only_used(core, [_FRAME, *(text for row in shown for text in row)]) if shown else core).to_str())


def _messages(data: str) -> list[list[str]]:
    """Return the texts of the messages of each demonstration in a file."""
    shown = rows.load(data)
    if evaluated := sorted({t for t in shown["task"] if splits()[t] != "train"}):
        names = ", ".join(evaluated[:5])
        raise UsageError(f"{data}: rows of tasks outside the train split, whose words no model may know: {names}")
    if not {"prompt", "completion"} <= set(shown.column_names):
        raise UsageError(f"{data}: no columns prompt and completion; give demonstrations")
    pairs = zip(shown["prompt"], shown["completion"], strict=True)
    try:
        found = [[m["content"] for m in (*prompt, *completion)] for prompt, completion in pairs]
    except TypeError as e:
        raise UsageError(f"{data}: prompt and completion are lists of messages, as train/data.py writes them") from e
    if not all(isinstance(text, str) for row in found for text in row):
        raise UsageError(f"{data}: prompt and completion are lists of messages with text")
    return found


def _kernels() -> list[str]:
    """Return one document for each task of the train split, as ``data.py style=compact`` shows it."""
    found = []
    for task in load_tasks(split="train"):
        source = expert_source(task.id)
        if source is not None:
            found.append(f"{instruction(task, 'cpu')}\n```python\n{compact(source, task.entry)}```")
    return found


def run(b: Build) -> None:
    """Write the model and print how large it is."""
    folder = build(b)
    save(b, folder)
    model, tokenizer = models.load(folder)
    print(f"{folder}: {sum(p.numel() for p in model.parameters()):,} weights, {len(tokenizer)} tokens, context {b.context}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; exit status 0 when written, 2 on bad usage."""
    return command("build_model.py", Build, __doc__, run, argv)


if __name__ == "__main__":
    sys.exit(main())
