"""Rows of prompts for trainers that read files: parquet, or JSON lines."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from kbx_env import jsonl
from kbx_env.errors import UsageError
from kbx_env.options import resolve_backend
from kbx_env.spec.catalog import load_tasks

SOURCE = "kbx_env"
"""Value of the column ``data_source``."""


def plain(split: str = "train", category: str | None = None, backend: str = "auto", **more: Any) -> Iterator[dict[str, Any]]:
    """Yield one row for each task: ``data_source``, ``prompt`` (messages), ``task``, ``category``, ``difficulty``.

    Args:
        split: ``train``, ``eval`` or ``all``.
        category: category of the tasks; ``None`` for all.
        backend: ``cpu``, ``cuda`` or ``auto``: the text says whether kernels are timed.
        **more: ``system`` and ``template``, as ``kbx_env.trl.prompts`` takes them, ``repeats`` and ``seed``.

    Yields:
        The rows.
    """
    from kbx_env.train.rows import prompt_rows

    backend = resolve_backend(backend) if backend == "auto" else backend
    for row in prompt_rows(load_tasks(category=category, split=split), backend, **more):
        messages = [{"role": m["role"], "content": m["content"]} for m in row["prompt"]]
        yield {"data_source": SOURCE, "prompt": messages, "task": row["task"], "category": row["category"],
               "difficulty": row["difficulty"]}  # fmt: skip


def write(path: str | Path, rows: Iterable[dict[str, Any]]) -> Path:
    """Write rows.

    Args:
        path: the file, which ends in ``.parquet`` or ``.jsonl``.
        rows: plain JSON.

    Returns:
        The file.

    Raises:
        UsageError: another ending, or a folder that cannot be written.
    """
    file = Path(path)
    if file.suffix not in (".parquet", ".jsonl"):
        raise UsageError(f"{file} must end in .parquet or .jsonl")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        if file.suffix == ".jsonl":
            jsonl.write(file, rows, ensure_ascii=False)
        else:
            import pyarrow
            import pyarrow.parquet

            part = file.with_suffix(".part")
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows)), part)
            part.replace(file)
    except OSError as e:
        raise UsageError(f"cannot write {file}: {e.strerror}") from e
    return file
