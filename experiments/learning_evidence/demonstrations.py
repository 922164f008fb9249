"""Choose the demonstrations of `train_evidence.py`, and the tasks that it holds back for reinforcement learning."""

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
    """Choose the demonstrations to learn from.

    Args:
        data: rows with ``task`` and ``completion``.
        tokens: returns the number of tokens of each text.
        among: tasks that may be held back.
        most: longest completion, in tokens; longer ones are left out, since later answers would be cut off there.
        hold: share, 0 to 1, of the tasks in ``among`` with a short enough row that are held back: none of their rows is shown.
        seed: seed of the choice.

    Returns:
        The rows, and counts: ``rows``, ``shown``, ``too_long``, ``held``, ``tasks``; and the lists ``shown_tasks``, ``held_tasks``.

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
    """Return the tasks whose prompt and answer fit into the model's context; all modes then have the same tasks.

    Args:
        model: folder of the checkpoint.
        ids: ids of tasks.
        backend: ``cpu`` or ``cuda``: the instruction that is shown.
        answer: tokens of an answer.

    Returns:
        Ids of tasks.
    """
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
