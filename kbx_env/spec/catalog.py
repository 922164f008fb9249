"""Finds tasks and expert kernels by listing folders: to add one, add one file."""

from __future__ import annotations

import fnmatch
import functools
import hashlib
import importlib
import inspect
import json
import pathlib
from collections.abc import Mapping
from typing import Any

from kbx_env.errors import DeclarationError, UnknownName, UsageError
from kbx_env.spec.task import CATEGORIES, Declaration, Task

SPLITS = ("train", "eval", "all")
PARTS = "# parts:"


def _folder(package: str) -> pathlib.Path:
    module = importlib.import_module(f"kbx_env.{package}")
    return pathlib.Path(next(iter(module.__path__)))


@functools.cache
def task_ids() -> tuple[str, ...]:
    """Return the ids (``category/name``) of all declared tasks, sorted."""
    root = _folder("tasks")
    found = [p.relative_to(root).with_suffix("").as_posix() for c in CATEGORIES for p in (root / c).glob("*.py")]
    return tuple(sorted(t for t in found if not t.rsplit("/", 1)[-1].startswith("_")))


@functools.cache
def _shared_maths() -> bytes:
    # Part of every fingerprint: without the shared quantization maths in it the store would return stale verdicts.
    return b"".join(p.read_bytes() for p in sorted(_folder("tasks").glob("_*.py")))


@functools.cache
def published_rows() -> Mapping[str, Any]:
    """Return the paper's cases of every task id, as ``tasks/published.json`` has them (``benchmarks/published_cases.py``)."""
    return json.loads((_folder("tasks") / "published.json").read_text())


@functools.cache
def load_task(task_id: str) -> Task:
    """Load a task.

    Args:
        task_id: ``category/name``, or the bare name where it is unique.

    Returns:
        The task; always the same object for one id.

    Raises:
        UnknownName: no such task; names the nearest ones.
        DeclarationError: the file does not hold exactly one declaration.
    """
    ids = task_ids()
    if task_id not in ids:
        same = [i for i in ids if i.rsplit("/", 1)[-1] == task_id]
        if len(same) != 1:
            raise UnknownName("task", task_id, ids, "List them with: python -m kbx_env tasks")
        task_id = same[0]
    path = _folder("tasks") / f"{task_id}.py"
    module = importlib.import_module("kbx_env.tasks." + task_id.replace("/", "."))
    found = [v for v in vars(module).values() if isinstance(v, Declaration)]
    if len(found) != 1:
        raise DeclarationError(f"{path}: expected one @task declaration, found {len(found)}")
    declared = found[0]
    spec = inspect.cleandoc(declared.reference.__doc__ or "")
    published = json.dumps(published_rows().get(task_id), sort_keys=True).encode()
    digest = hashlib.sha256(path.read_bytes() + _shared_maths() + published).hexdigest()
    return Task(
        id=task_id, category=task_id.split("/")[0], entry=declared.reference.__name__, spec=spec,
        signature=inspect.signature(declared.reference), reference=declared.reference, fingerprint=digest,
        **declared.fields,
    )  # fmt: skip


@functools.cache
def splits() -> Mapping[str, str]:
    """Return the split of every task id, ``train`` or ``eval``, as fixed in ``tasks/splits.json``."""
    return json.loads((_folder("tasks") / "splits.json").read_text())["split"]


def load_tasks(*, category: str | None = None, split: str = "all", pattern: str = "*") -> list[Task]:
    """Load tasks by category, split and name.

    Args:
        category: in any case of letters; ``None`` for all categories.
        split: ``train``, ``eval`` or ``all``.
        pattern: globs over ids or bare names, separated by commas.

    Returns:
        At least one task, sorted by id.

    Raises:
        UnknownName: no such category, split, or nothing matches the pattern.
        UsageError: the category has no task in the split.
    """
    if category is not None and category.lower() not in CATEGORIES:
        raise UnknownName("category", category, CATEGORIES)
    if split not in SPLITS:
        raise UnknownName("split", split, SPLITS)
    ids = [
        t for t in task_ids()
        if (category is None or t.startswith(category.lower() + "/"))
        and (split == "all" or splits().get(t) == split)
        and any(fnmatch.fnmatchcase(t, p) or fnmatch.fnmatchcase(t.split("/")[1], p) for p in pattern.split(","))
    ]  # fmt: skip
    if not ids and pattern == "*" and category is not None:
        having = sorted({splits()[t] for t in task_ids() if t.startswith(category.lower() + "/")})
        raise UsageError(f"no task of category {category!r} in split {split!r}; it has tasks in: {', '.join(having)}")
    if not ids:
        raise UnknownName("task pattern", pattern, task_ids(), f"No task matches in split {split!r}.")
    return [load_task(t) for t in ids]


@functools.cache
def expert_source(task_id: str) -> str | None:
    """Return the project's own kernel for a task as one self-contained source.

    An expert whose first line is ``# parts: a, b`` begins with the text of ``experts/_parts/a.py`` and ``b.py``.

    Args:
        task_id: ``category/name``.

    Returns:
        The source, or ``None`` for a task without an expert.
    """
    root = _folder("baselines") / "experts"
    path = root / f"{task_id}.py"
    if not path.is_file():
        return None
    text = path.read_text()
    if not text.startswith(PARTS):
        return text
    first, _, body = text.partition("\n")
    pieces = [(root / "_parts" / f"{name.strip()}.py").read_text() for name in first[len(PARTS) :].split(",")]
    imports: dict[str, None] = {}
    rest = []
    for piece in (*pieces, body):
        lines = piece.splitlines()
        imports.update(dict.fromkeys(line for line in lines if line.startswith(("import ", "from "))))
        rest.append("\n".join(line for line in lines if not line.startswith(("import ", "from "))).strip("\n"))
    return "\n".join(imports) + "\n\n\n" + "\n\n\n".join(rest) + "\n"
