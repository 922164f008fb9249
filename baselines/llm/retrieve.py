"""Finds the expert kernel nearest to a text, by BM25: of the train split only, and never the one that solves the task."""

from __future__ import annotations

import functools
import re
from typing import Any

from kbx_env.errors import UsageError
from kbx_env.spec.catalog import expert_source, load_task, splits

_WORD = re.compile(r"[A-Za-z][a-z]+|[A-Z]+|[a-z]+|\d+")


def words(text: str) -> list[str]:
    """Lower-case pieces of words and identifiers: ``fused_exp_mean`` is three."""
    return [w.lower() for w in _WORD.findall(text)]


@functools.cache
def _index(by: str) -> tuple[Any, tuple[str, ...]]:
    try:
        import bm25s
    except ImportError as e:
        raise UsageError('retrieval needs the bm25s package: pip install "kbx_env[llm]"') from e
    tasks = tuple(t for t, split in sorted(splits().items()) if split == "train" and expert_source(t) is not None)
    texts = [f"{t} {load_task(t).spec}" if by == "text" else expert_source(t) or "" for t in tasks]
    index = bm25s.BM25()
    index.index([words(t) for t in texts], show_progress=False)
    return index, tasks


def nearest(query: str, *, by: str, without: str) -> str | None:
    """The id of the task whose expert is nearest.

    Args:
        query: an instruction, or code.
        by: ``text`` compares it to tasks' names and contracts, ``code`` to the experts' sources.
        without: a task that may not be the answer: the one that is to be solved.
    """
    index, tasks = _index(by)
    asked = words(query)
    if not asked:
        return None
    found, scores = index.retrieve([asked], k=2, show_progress=False)
    for number, score in zip(found[0].tolist(), scores[0].tolist()):
        if tasks[number] != without and score > 0:
            return tasks[number]
    return None
