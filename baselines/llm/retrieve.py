"""Finds the expert kernel nearest to a text, by BM25 over the experts of the train split."""

from __future__ import annotations

import functools
import re
from typing import Any

from kbx_env.errors import UsageError
from kbx_env.extras import install_hint
from kbx_env.spec.catalog import expert_source, load_task, splits

_WORD = re.compile(r"[A-Za-z][a-z]+|[A-Z]+|[a-z]+|\d+")


def words(text: str) -> list[str]:
    """Return the parts of words and identifiers in lower case: ``fused_exp_mean`` has three."""
    return [w.lower() for w in _WORD.findall(text)]


@functools.cache
def _index(by: str) -> tuple[Any, tuple[str, ...]]:
    try:
        import bm25s
    except ImportError as e:
        raise UsageError(f"retrieval needs the bm25s package: {install_hint('llm')}") from e
    tasks = tuple(t for t, split in sorted(splits().items()) if split == "train" and expert_source(t) is not None)
    texts = [f"{t} {load_task(t).spec}" if by == "text" else expert_source(t) or "" for t in tasks]
    index = bm25s.BM25()
    index.index([words(t) for t in texts], show_progress=False)
    return index, tasks


def nearest(query: str, *, by: str, without: str) -> str | None:
    """Find the task of the train split whose expert kernel is nearest to a query.

    Args:
        query: an instruction, or code.
        by: ``text`` to compare with names and contracts of tasks, ``code`` to compare with sources of experts.
        without: id of the task that is to be solved; its own expert is never found.

    Returns:
        The id of the nearest task; ``None`` where no task shares a word with the query.

    Raises:
        UsageError: the package bm25s is not installed.
    """
    index, tasks = _index(by)
    tokens = words(query)
    if not tokens:
        return None
    found, scores = index.retrieve([tokens], k=2, show_progress=False)
    for number, score in zip(found[0].tolist(), scores[0].tolist()):
        if tasks[number] != without and score > 0:
            return tasks[number]
    return None
