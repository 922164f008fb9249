"""Datasets of prompts and demonstrations: make, write, read, sort and filter their rows."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kbx_env import jsonl
from kbx_env.envs.prompt import instruction
from kbx_env.errors import UnknownName, UsageError
from kbx_env.extras import install_hint
from kbx_env.spec.catalog import matching, splits, task_ids
from kbx_env.spec.task import CATEGORIES, Task

if TYPE_CHECKING:
    from datasets import Dataset

FORMATS = ("parquet", "jsonl", "arrow")
"""File formats of datasets."""


def message(task: Task, backend: str, template: str | None = None) -> dict[str, str]:
    """Return the user's message of a prompt; without a template the same that the policy ``hf:FOLDER`` sends.

    Args:
        task: the task.
        backend: ``cpu`` or ``cuda``.
        template: another text, with fields in braces: ``{instruction}`` is the text without a template, ``{task}``,
            ``{entry}``, ``{signature}`` and ``{contract}`` are parts of it. A brace of the text itself is doubled.

    Returns:
        The message, with ``role`` and ``content``.

    Raises:
        UsageError: the template has an unknown field or an unpaired brace.
    """
    text = instruction(task, backend)
    if template is not None:
        fields = {
            "instruction": text, "task": task.id, "entry": task.entry, "signature": str(task.signature), "contract": task.spec
        }  # fmt: skip
        try:
            text = template.format_map(fields)
        except (KeyError, ValueError, IndexError, AttributeError) as e:
            names = ", ".join(f"{{{name}}}" for name in fields)
            raise UsageError(f"template: {type(e).__name__}: {e}; fields are {names}, and other braces are doubled") from e
    return {"role": "user", "content": text}


def messages(
    task: Task, backend: str, system: str | None = None, template: str | None = None
) -> list[dict[str, str]]:  # fmt: skip
    """Return the messages of a prompt.

    Args:
        task: the task.
        backend: ``cpu`` or ``cuda``.
        system: a system message before the task's; ``None`` for none.
        template: text of the user's message, as ``message`` takes it.

    Returns:
        One or two messages, each with ``role`` and ``content``.
    """
    before = [] if system is None else [{"role": "system", "content": system}]
    return [*before, message(task, backend, template)]


def about(task: Task) -> dict[str, Any]:
    """Return the columns that describe a task."""
    return {"task": task.id, "category": task.category, "difficulty": task.difficulty}


def prompts(
    tasks: Sequence[Task], backend: str, *, repeats: int = 1, seed: int = 0, system: str | None = None,
    template: str | None = None,
) -> Dataset:  # fmt: skip
    """Make the rows of ``prompt_rows`` as a dataset.

    Args:
        tasks: the tasks, in this order.
        backend: ``cpu`` or ``cuda``, not ``auto``: the instruction says whether kernels are timed.
        repeats: rows for each task.
        seed: seed of the rows' seeds.
        system: a system message; ``None`` for none.
        template: text of the user's message, as ``message`` takes it.

    Returns:
        The rows.
    """
    return _dataset(prompt_rows(tasks, backend, repeats=repeats, seed=seed, system=system, template=template))


def prompt_rows(
    tasks: Sequence[Task], backend: str, *, repeats: int = 1, seed: int = 0, system: str | None = None,
    template: str | None = None,
) -> list[dict[str, Any]]:  # fmt: skip
    """Make one row for each task and repeat: ``prompt``, ``task``, ``seed``, ``category``, ``difficulty``.

    Each message of a prompt has one more key, ``task``. Chat templates ignore it, and functions that are given only the prompt
    can read it.

    Args:
        tasks: the tasks, in this order.
        backend: ``cpu`` or ``cuda``, not ``auto``: the instruction says whether kernels are timed.
        repeats: rows for each task, each with a seed of its own; all tasks come once before the next repeat.
        seed: seed of the rows' seeds, which lie in [0, 2^31).
        system: a system message before the user's message; ``None`` for none.
        template: text of the user's message, as ``message`` takes it.

    Returns:
        The rows.

    Raises:
        UsageError: ``repeats`` is below 1, or a template that cannot be filled in.
        UnknownName: no such backend.
    """
    if repeats < 1:
        raise UsageError(f"repeats is {repeats}; at least 1")
    if backend not in ("cpu", "cuda"):
        raise UnknownName("backend of prompts", backend, ("cpu", "cuda"))
    return [
        {"prompt": [m | {"task": t.id} for m in messages(t, backend, system, template)],
         "seed": _seed(seed, t.id, turn), **about(t)}
        for turn in range(repeats) for t in tasks
    ]  # fmt: skip


def _seed(seed: int, task: str, turn: int) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed} {task} {turn}".encode()).digest()[:4], "big") >> 1


def by_difficulty(dataset: Dataset) -> Dataset:
    """Sort rows by difficulty, easy ones first; rows of one difficulty keep their order."""
    levels = dataset["difficulty"]
    return dataset.select(sorted(range(len(dataset)), key=lambda i: levels[i]))


def only(dataset: Dataset, *, category: str | None = None, pattern: str = "*", split: str = "all") -> Dataset:
    """Return the rows that meet all conditions.

    Args:
        dataset: the rows.
        category: category of their tasks; ``None`` for all.
        pattern: glob over ids or names of tasks, comma-separated for several; each must match a row.
        split: split of their tasks, or ``all``.

    Returns:
        The rows.

    Raises:
        UnknownName: no such category, or a glob matches no row.
    """
    if category is not None and category.lower() not in CATEGORIES:
        raise UnknownName("category", category, CATEGORIES)
    tasks = list(dataset["task"])
    some = sorted({
        t for t in tasks
        if (category is None or t.startswith(category.lower() + "/")) and (split == "all" or splits()[t] == split)
    })  # fmt: skip
    more = "" if category is None else f" and category {category!r}"
    wanted = set(matching(some, pattern, set(tasks), f"No row matches it{more}."))
    keep = [i for i, t in enumerate(tasks) if t in wanted]
    return dataset if len(keep) == len(tasks) else dataset.select(keep)


def write(dataset: Dataset, path: Path, form: str) -> Path:
    """Write a dataset atomically.

    Args:
        dataset: the rows.
        path: the file, without the ending of its format.
        form: one of ``FORMATS``.

    Returns:
        The file that was written; for ``arrow`` a folder.

    Raises:
        UnknownName: no such format.
    """
    if form not in FORMATS:
        raise UnknownName("format", form, FORMATS)
    file, part = path.with_suffix(f".{form}"), path.with_suffix(".part")
    if form == "arrow":
        shutil.rmtree(part, ignore_errors=True)
        dataset.save_to_disk(part)
        shutil.rmtree(file, ignore_errors=True)
    elif form == "parquet":
        import pyarrow.parquet

        pyarrow.parquet.write_table(dataset.with_format("arrow")[:], part)
    else:
        jsonl.write(file, dataset, ensure_ascii=False)
        return file
    part.replace(file)
    return file


def load(path: str | Path) -> Dataset:
    """Read a dataset that ``write`` wrote, in the format of its ending.

    Args:
        path: the file, or the folder of arrow files.

    Returns:
        The rows; each names a known task.

    Raises:
        UsageError: no such file, it cannot be read in its format, or a row has no task; names the row, counted from 1.
        UnknownName: a row has an unknown task.
    """
    file = Path(path)
    if not file.exists():
        raise UsageError(f"no data in {str(path)!r}; make it with: python train/data.py out={file.parent}")
    form = file.suffix.removeprefix(".") if not file.is_dir() else "arrow"
    if form not in FORMATS:
        raise UsageError(f"{file}: a file ends in .parquet or .jsonl, and a folder holds arrow files")
    try:
        data = _read(file, form)
    except UsageError:
        raise
    except Exception as e:
        raise UsageError(f"{file} cannot be read as {form}: {type(e).__name__}: {str(e)[:300]}") from e
    if not len(data):
        raise UsageError(f"{file} has no rows; make it anew with train/data.py")
    if "task" not in data.column_names:
        raise UsageError(f"{file}: row 1 has no column 'task'; columns: {', '.join(data.column_names)}")
    known = set(task_ids())
    for number, task in enumerate(data["task"], 1):
        if task is None:
            raise UsageError(f"{file}: row {number} has no task; every row names one, as category/name")
        if task not in known:
            raise UnknownName(f"task in row {number} of {file}", task, known)
    return data


def _read(file: Path, form: str) -> Dataset:
    from datasets import Dataset, load_from_disk

    if form == "arrow":
        found = load_from_disk(str(file))
        if not isinstance(found, Dataset):
            raise UsageError(f"{file} holds several splits; give the folder of one")
        return found
    if form == "parquet":
        import pyarrow.parquet

        return Dataset(pyarrow.parquet.read_table(file))  # `Dataset.from_parquet` would copy it to a cache in the home folder
    rows = []
    with file.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            try:
                row = jsonl.parse(file, number, line)
            except jsonl.NotJson as e:
                raise UsageError(f"{file}: row {number} is no JSON: {e.reason}") from e
            if not isinstance(row, dict):
                raise UsageError(f"{file}: row {number} is no JSON object")
            if "task" not in row:
                raise UsageError(f"{file}: row {number} has no column 'task'; columns: {', '.join(row)}")
            rows.append(row)
    return _dataset(rows)


def _dataset(rows: list[dict[str, Any]]) -> Dataset:
    try:
        from datasets import Dataset
    except ImportError as e:
        raise UsageError(f"training data needs datasets: {install_hint('trl')}") from e
    return Dataset.from_list(rows)
