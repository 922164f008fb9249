"""Which demonstrations `train_evidence.py` shows, and which tasks it keeps for reinforcement learning."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from datasets import Dataset


def shown(
    data: Dataset, tokens: Callable[[Sequence[str]], Sequence[int]], among: Collection[str], *, most: int, hold: float, seed: int
) -> tuple[Dataset, dict[str, Any]]:
    """The demonstrations to learn from, and what was left out.

    Args:
        data: rows with ``task`` and ``completion``.
        tokens: of completions' texts.
        among: tasks that may be held back.
        most: tokens of a completion; longer ones are left out, they would be cut off in every later answer.
        hold: share, 0 to 1, of the tasks in ``among`` with a row that is short enough: none of their rows is shown.
        seed: of their choice.

    Returns:
        The rows that are left, and counts: ``rows``, ``shown`` and those left out as ``too_long`` or ``held``; ``shown_tasks``,
        ``held_tasks``.

    Raises:
        ValueError: nothing is left.
    """
    texts = ["".join(m["content"] for m in row) for row in data["completion"]]
    rows = [(task, n <= most) for task, n in zip(data["task"], tokens(texts), strict=True)]
    known = sorted({t for t, short in rows if short and t in among})
    held = set(random.Random(seed).sample(known, max(1, round(hold * len(known))) if hold and known else 0))
    left = [k for k, (t, short) in enumerate(rows) if short and t not in held]
    if not left:
        raise ValueError(f"of {len(rows)} demonstrations none is left: --most-tokens {most}, --hold {hold}")
    seen = sorted({rows[k][0] for k in left})
    return data.select(left), {
        "rows": len(rows), "shown": len(left), "too_long": sum(not short for _, short in rows),
        "held": sum(short and t in held for t, short in rows), "tasks": len(seen), "shown_tasks": seen, "held_tasks": sorted(held),
    }  # fmt: skip


def fitting(model: Path, ids: Sequence[str], backend: str, answer: int) -> list[str]:
    """The tasks whose prompt and an answer of so many tokens fit into the model: all modes are asked the same ones."""
    from kbx_env.baselines.llm.conversation import Conversation
    from kbx_env.train import models, rows
    from transformers import AutoConfig

    from kbx_env.spec.catalog import load_task

    context = getattr(AutoConfig.from_pretrained(model).get_text_config(), "max_position_embeddings", None)
    conversation = Conversation(models.tokenizer_for(model))
    return [
        t for t in ids
        if context is None or len(conversation.opening([rows.message(load_task(t), backend)])) + answer <= context
    ]  # fmt: skip
