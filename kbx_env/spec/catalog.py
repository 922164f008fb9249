"""Finds tasks and expert kernels by listing folders: to add one, add one file."""

from __future__ import annotations

import fnmatch
import functools
import hashlib
import importlib
import inspect
import json
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any

from kbx_env.errors import DeclarationError, UnknownName, UsageError
from kbx_env.spec import packs
from kbx_env.spec.task import CATEGORIES, Declaration, Task

SPLITS = ("train", "eval", "all")
PARTS = "# parts:"


def _folder(package: str) -> pathlib.Path:
    module = importlib.import_module(f"kbx_env.{package}")
    return pathlib.Path(next(iter(module.__path__)))


def task_ids(tasks_from: str | None = None) -> tuple[str, ...]:
    """Return the ids of all tasks of the selected packs, sorted: ``category/name``, or ``category/pack.name``.

    Args:
        tasks_from: packs (``packs.chosen``); ``None`` for the selected ones, by default the benchmark's own tasks.

    Returns:
        The ids.
    """
    return _ids(packs.selected() if tasks_from is None else packs.chosen(tasks_from))


@functools.cache
def _ids(chosen: tuple[packs.Pack | None, ...]) -> tuple[str, ...]:
    return tuple(sorted(t for pack in chosen for t in (pack.task_ids() if pack else _builtin_ids())))


@functools.cache
def _builtin_ids() -> tuple[str, ...]:
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


def load_task(task_id: str, tasks_from: str | None = None) -> Task:
    """Load a task.

    Args:
        task_id: ``category/name`` or ``category/pack.name``; of a selected task also ``category/name`` without the pack, or
            the bare name, where it is unique.
        tasks_from: packs, as for ``load_tasks``; ``None`` for the selected ones.

    Returns:
        The task; always the same object for one id.

    Raises:
        UnknownName: no such task; names the nearest ones.
        DeclarationError: the file does not hold exactly one declaration.
        UsageError: the file of a pack cannot be imported.
    """
    return _load(full_id(task_id, tasks_from))


def full_id(task_id: str, tasks_from: str | None = None) -> str:
    """Return the full id of a task, without loading it.

    Args:
        task_id: as for ``load_task``.
        tasks_from: as for ``load_task``.

    Returns:
        ``category/name`` or ``category/pack.name``.

    Raises:
        UnknownName: no such task; names the nearest ones.
    """
    return _resolved(task_id, packs.selected() if tasks_from is None else packs.chosen(tasks_from))


def _resolved(task_id: str, chosen: tuple[packs.Pack | None, ...]) -> str:
    """Return the full id of a task.

    Args:
        task_id: as for ``load_task``.
        chosen: packs in which short names are looked up.

    Returns:
        The id.

    Raises:
        UnknownName: no such task.
    """
    if None in chosen and task_id in _builtin_ids():
        return task_id
    pack = packs.pack_of(task_id)
    if pack is not None and (pack.root / f"{packs.split_id(task_id)[1]}.py").is_file():  # files may be added later
        return task_id
    ids = _ids(chosen)
    same = [i for i in ids if task_id in _short(i)]
    if len(same) != 1 and task_id in _builtin_ids():
        return task_id
    if len(same) != 1:
        raise UnknownName("task", task_id, ids, "List them with: python -m kbx_env tasks")
    return same[0]


def _short(task_id: str) -> tuple[str, ...]:
    """Return the other names of a task."""
    local = packs.split_id(task_id)[1]
    return task_id.rsplit("/", 1)[-1], local, local.rsplit("/", 1)[-1]


def source_file(task_id: str) -> pathlib.Path:
    """Return the file that declares a task; ``task_id`` is the full id."""
    pack, local = packs.pack_of(task_id), packs.split_id(task_id)[1]
    return (pack.root if pack else _folder("tasks")) / f"{local}.py"


def fingerprint(task_id: str) -> str:
    """Compute the digest of a declaration: its file, the helpers that it shares, and the paper's cases.

    Args:
        task_id: the full id.

    Returns:
        The hexadecimal SHA-256 digest, which ``Task.fingerprint`` has too.
    """
    pack = packs.pack_of(task_id)
    published = json.dumps(published_rows().get(task_id), sort_keys=True).encode()
    shared = _shared_maths() + (pack.helpers() if pack else b"")
    return hashlib.sha256(source_file(task_id).read_bytes() + shared + published).hexdigest()


@functools.cache
def _load(task_id: str) -> Task:
    pack, local, path = packs.pack_of(task_id), packs.split_id(task_id)[1], source_file(task_id)
    try:
        module = pack.module(local) if pack else importlib.import_module("kbx_env.tasks." + local.replace("/", "."))
    except Exception as e:
        if pack is None:
            raise
        raise UsageError(f"the task file {path} cannot be imported: {type(e).__name__}: {e}") from e
    found = [v for v in vars(module).values() if isinstance(v, Declaration)]
    if len(found) != 1:
        raise DeclarationError(f"{path}: expected one @task declaration, found {len(found)}")
    declared = found[0]
    spec = inspect.cleandoc(declared.reference.__doc__ or "")
    return Task(
        id=task_id, category=task_id.split("/")[0], entry=declared.reference.__name__, spec=spec,
        signature=inspect.signature(declared.reference), reference=declared.reference,
        fingerprint=fingerprint(task_id),
        **declared.fields,
    )  # fmt: skip


@functools.cache
def task_set_hash() -> str:
    """Return one hash over the benchmark's own tasks: id, split and fingerprint of each. No task is imported.

    Returns:
        SHA-256 in hexadecimal.
    """
    lines = (f"{t} {_builtin_splits().get(t)} {fingerprint(t)}\n" for t in _builtin_ids())
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def splits() -> Mapping[str, str]:
    """Return the split of every task id: those of ``tasks/splits.json``, and of the registered packs."""
    return _splits(packs.registered())


@functools.lru_cache(maxsize=64)
def _splits(known: tuple[packs.Pack, ...]) -> Mapping[str, str]:
    found = dict(_builtin_splits())
    for pack in known:
        found |= {t: pack.split(packs.split_id(t)[1]) for t in _ids((pack,))}
    return found


@functools.cache
def _builtin_splits() -> Mapping[str, str]:
    return json.loads((_folder("tasks") / "splits.json").read_text())["split"]


def load_tasks(
    *, category: str | None = None, split: str = "all", pattern: str = "*", tasks_from: str | None = None
) -> list[Task]:  # fmt: skip
    """Load tasks by category, split and name.

    Args:
        category: in any case of letters; ``None`` for all categories.
        split: ``train``, ``eval``, ``all``, or a split of a pack.
        pattern: globs over ids or bare names, separated by commas; each must match a task of this category and split.
        tasks_from: packs of tasks: folders or names of installed packs, separated by commas, ``builtin`` for the
            benchmark's own tasks; ``None`` for those of ``KBX_TASKS``.

    Returns:
        At least one task, sorted by id.

    Raises:
        UnknownName: no such category, split, or a glob matches nothing; names the glob.
        UsageError: the category has no task in the split.
    """
    return [load_task(t) for t in select_ids(category=category, split=split, pattern=pattern, tasks_from=tasks_from)]


def select_ids(
    *, category: str | None = None, split: str = "all", pattern: str = "*", tasks_from: str | None = None
) -> list[str]:
    """Return the ids of the tasks that ``load_tasks`` loads, without loading them; arguments and errors as there."""
    if category is not None and category.lower() not in CATEGORIES:
        raise UnknownName("category", category, CATEGORIES)
    every = task_ids(tasks_from)
    known = dict.fromkeys((*SPLITS, *packs.split_names()))
    if split not in known:
        raise UnknownName("split", split, known)
    ids = [
        t for t in every
        if (category is None or t.startswith(category.lower() + "/")) and (split == "all" or splits().get(t) == split)
    ]  # fmt: skip
    if not ids and category is not None:
        having = sorted({splits()[t] for t in every if t.startswith(category.lower() + "/")})
        raise UsageError(f"no task of category {category!r} in split {split!r}; it has tasks in: {', '.join(having) or 'none'}")
    among = f"split {split!r}" if category is None else f"split {split!r} and category {category!r}"
    return matching(ids, pattern, every, f"No task matches in {among}.")


def matching(ids: Iterable[str], pattern: str, known: Iterable[str], remedy: str = "") -> list[str]:
    """Return the ids that globs match. A glob that matches none of them is an error: a task that was meant would be missing.

    Args:
        ids: ids of tasks.
        pattern: globs over ids or bare names, separated by commas; spaces around them do not count.
        known: ids that the error may suggest.
        remedy: ends the message of the error.

    Returns:
        The ids that at least one glob matches, in their order.

    Raises:
        UnknownName: a glob matches no id; names the glob.
    """
    ids, found = list(ids), set[str]()
    names = {t: (t, *_short(t)) for t in ids}
    for glob in [g for p in pattern.split(",") if (g := p.strip())] or [pattern]:
        hits = {t for t in ids if any(fnmatch.fnmatchcase(name, glob) for name in names[t])}
        if not hits:
            raise UnknownName("task pattern", glob, known, remedy)
        found |= hits
    return [t for t in ids if t in found]


def expert_source(task_id: str) -> str | None:
    """Return the own kernel of the project or of a pack for a task, as one self-contained source.

    An expert whose first line is ``# parts: a, b`` begins with the text of ``experts/_parts/a.py`` and ``b.py``. A pack has
    parts of its own in ``experts/_parts``, and may use those of the project.

    Args:
        task_id: the full id of a task.

    Returns:
        The source, or ``None`` for a task without an expert.
    """
    return _expert(task_id, packs.pack_of(task_id))


@functools.cache
def _expert(task_id: str, pack: packs.Pack | None) -> str | None:
    local = packs.split_id(task_id)[1]
    own = _folder("baselines") / "experts"
    root = pack.root / "experts" if pack else own
    path = root / f"{local}.py"
    if not path.is_file():
        return None
    text = path.read_text()
    if not text.startswith(PARTS):
        return text
    first, _, body = text.partition("\n")
    pieces = [_part(name.strip(), path, root, own) for name in first[len(PARTS) :].split(",")]
    imports: dict[str, None] = {}
    rest = []
    for piece in (*pieces, body):
        lines = piece.splitlines()
        imports.update(dict.fromkeys(line for line in lines if line.startswith(("import ", "from "))))
        rest.append("\n".join(line for line in lines if not line.startswith(("import ", "from "))).strip("\n"))
    return "\n".join(imports) + "\n\n\n" + "\n\n\n".join(rest) + "\n"


def _part(name: str, expert: pathlib.Path, *roots: pathlib.Path) -> str:
    """Return the text of a part of an expert, from the first folder that has it."""
    for root in roots:
        if (path := root / "_parts" / f"{name}.py").is_file():
            return path.read_text()
    known = {p.stem for root in roots for p in (root / "_parts").glob("*.py")}
    raise UnknownName("part of experts", name, known, f"It is named in the first line of {expert}.")
