"""Task packs: folders or installed packages of further tasks, beside those of the benchmark.

A pack has the layout of ``tasks/``: ``CATEGORY/NAME.py`` with one declaration each, helpers in ``_*.py``, and optionally
``experts/CATEGORY/NAME.py``, ``splits.json``, ``telling.json`` and a card ``pack.json``. The task of a file has the id
``CATEGORY/PACK.NAME``, so that no two packs collide.

A pack is *registered* once a process has opened it: ``load_task`` then finds its tasks. The packs that are *selected*
(``--tasks-from``, ``KBX_TASKS``) are those from which tasks are listed. Both are environment variables, so that child
processes have the same packs. The code of a pack is trusted as much as the benchmark's own; submissions are not, and
their processes do not get these variables.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import json
import os
import re
import sys
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from kbx_env.errors import UnknownName, UsageError
from kbx_env.spec.task import CATEGORIES

SELECTED = "KBX_TASKS"
"""Environment variable with the packs from which tasks are listed: folders or names, separated by commas. Empty or missing:
the benchmark's own tasks."""
REGISTERED = "KBX_PACKS"
"""Environment variable with the folders of all opened packs, as JSON; the package sets it for its child processes."""
GROUP = "kbx_env.tasks"
"""Entry point group of installed packs. The entry point names the package that holds the task files."""
BUILTIN = "builtin"
"""Name of the benchmark's own tasks in a selection."""
MODULES = "kbx_packs"
"""Parent of the modules of packs; submissions must not import it."""
CARD = "pack.json"
"""File that describes a pack; all fields are optional."""
DEFAULT_SPLIT = "train"
"""Split of a task that ``splits.json`` does not list."""
_NAME = re.compile(r"[a-z][a-z0-9_]{0,39}")
_LOCK = threading.Lock()


@dataclass(frozen=True)
class Pack:
    """A registered pack.

    Attributes:
        name: part of the ids of its tasks.
        root: absolute folder with the categories.
    """

    name: str
    root: Path

    def task_ids(self) -> tuple[str, ...]:
        """Return the ids of its tasks, ``category/pack.name``, sorted."""
        found = (p for c in CATEGORIES for p in (self.root / c).glob("*.py") if not p.name.startswith("_"))
        return tuple(sorted(self.id_of(f"{p.parent.name}/{p.stem}") for p in found))

    def id_of(self, local: str) -> str:
        """Return the id of a task.

        Args:
            local: ``category/name``, as the path of the file.

        Returns:
            ``category/pack.name``.
        """
        category, name = local.split("/")
        return f"{category}/{self.name}.{name}"

    def module(self, local: str) -> ModuleType:
        """Import the file of a task; arguments as for ``id_of``."""
        return importlib.import_module(f"{MODULES}.{self.name}.{local.replace('/', '.')}")

    def helpers(self) -> bytes:
        """Return the text of the files that its tasks share."""
        return b"".join(p.read_bytes() for p in sorted(self.root.glob("_*.py")))

    def card(self) -> Mapping[str, Any]:
        """Return the card; empty where there is none."""
        return _object(self.root / CARD)

    def split(self, local: str) -> str:
        """Return the split of a task; arguments as for ``id_of``."""
        return str(_splits(self.root).get(local, DEFAULT_SPLIT))


def split_id(task_id: str) -> tuple[str | None, str]:
    """Split the id of a task.

    Args:
        task_id: ``category/pack.name``, or ``category/name`` for a task of the benchmark.

    Returns:
        The name of the pack, or ``None``; and ``category/name``.
    """
    category, _, name = task_id.partition("/")
    pack, dot, rest = name.partition(".")
    return (pack, f"{category}/{rest}") if dot else (None, task_id)


def pack_of(task_id: str) -> Pack | None:
    """Return the registered pack of a task; ``None`` for a task of the benchmark, or of a pack that is not registered."""
    name = split_id(task_id)[0]
    return next((p for p in registered() if p.name == name), None) if name else None


def registered() -> tuple[Pack, ...]:
    """Return all packs that this process or its parents opened, the selected ones too."""
    selected()  # registers what the environment selects
    return _registered(os.environ.get(REGISTERED, ""))


@functools.lru_cache(maxsize=64)
def _registered(text: str) -> tuple[Pack, ...]:
    found = tuple(Pack(name, Path(root)) for name, root in (json.loads(text) if text else ()))
    for pack in found:
        _provide(pack)
    return found


def roots() -> list[str]:
    """Return the folders of all registered packs, for requests to worker processes that may have started earlier."""
    return [str(p.root) for p in registered()]


def register(places: Iterable[str]) -> None:
    """Open packs, for a request from another process.

    Args:
        places: their folders.

    Raises:
        UsageError: a folder is not a pack.
    """
    for place in places:
        find(place)


def selected() -> tuple[Pack | None, ...]:
    """Return the packs from which tasks are listed.

    Returns:
        The packs; ``None`` stands for the benchmark's own tasks.

    Raises:
        UsageError: ``KBX_TASKS`` names what is no pack.
    """
    return chosen(os.environ.get(SELECTED, ""))


def select(spec: str) -> tuple[Pack | None, ...]:
    """List tasks from these packs from now on, here and in child processes.

    Args:
        spec: packs, separated by commas.

    Returns:
        The packs.

    Raises:
        UsageError: one of them is no pack.
    """
    found = chosen(spec)
    os.environ[SELECTED] = ",".join(str(p.root) if p else BUILTIN for p in found)
    return found


def chosen(spec: str) -> tuple[Pack | None, ...]:
    """Return the packs of a selection, and register them.

    Args:
        spec: folders or names of installed packs, separated by commas; ``builtin`` for the benchmark's own tasks. Empty for
            these alone.

    Returns:
        The packs, each once.

    Raises:
        UsageError: one of them is no pack.
    """
    found = _chosen(spec)
    for pack in found:
        _add(pack)
    return found


@functools.lru_cache(maxsize=64)
def _chosen(spec: str) -> tuple[Pack | None, ...]:
    parts = [part.strip() for part in spec.split(",") if part.strip()] or [BUILTIN]
    return tuple(dict.fromkeys(None if part == BUILTIN else find(part) for part in parts))


def find(place: str) -> Pack:
    """Open a pack and register it.

    Args:
        place: a folder, or the name of an installed pack.

    Returns:
        The pack.

    Raises:
        UsageError: it is no pack, or another pack has its name.
    """
    root = Path(place).expanduser()
    if not root.is_dir():
        root = _installed(place)
    pack = _opened(root.resolve())
    _add(pack)
    return pack


def _add(pack: Pack | None) -> None:
    """Register a pack.

    Args:
        pack: ``None`` stands for the benchmark's own tasks, which need not be registered.

    Raises:
        UsageError: another pack has its name.
    """
    if pack is None:
        return
    with _LOCK:
        text = os.environ.get(REGISTERED, "")
        known = _registered(text)
        for other in known:
            if other.name == pack.name and other.root != pack.root:
                raise UsageError(
                    f"two task packs are named {pack.name!r}: {other.root} and {pack.root}; "
                    f'give one another name in its {CARD}: {{"name": "other"}}'
                )
        if pack not in known:
            os.environ[REGISTERED] = json.dumps([[p.name, str(p.root)] for p in (*known, pack)])
            _registered(os.environ[REGISTERED])


def _installed(name: str) -> Path:
    """Return the folder of an installed pack."""
    points = {p.name: p for p in importlib.metadata.entry_points(group=GROUP)}
    if name not in points:
        listed = ", ".join(sorted(points)) or "none"
        raise UsageError(
            f"no task pack {name!r}; give a folder with task files CATEGORY/NAME.py, {BUILTIN!r}, or an installed pack "
            f"(installed: {listed})"
        )
    try:
        return Path(next(iter(importlib.import_module(points[name].value).__path__)))
    except (ImportError, AttributeError, StopIteration) as e:
        raise UsageError(f"the entry point {name!r} of {GROUP} is {points[name].value!r}, which is no package: {e}") from e


def _opened(root: Path) -> Pack:
    """Return the pack in a folder, with the name of its card or else of the folder."""
    if "," in str(root):
        raise UsageError(f"{root}: the folder of a task pack must have no comma in its path; commas separate packs")
    if not any((root / c).is_dir() for c in CATEGORIES):
        raise UsageError(
            f"{root} is no task pack: it has none of the folders {', '.join(CATEGORIES)}. Begin one with: "
            f"python -m kbx_env new-task CATEGORY/NAME --pack {root}"
        )
    name = _object(root / CARD).get("name") or re.sub(r"\W+", "_", root.name.lower()).strip("_")
    if not isinstance(name, str) or not _NAME.fullmatch(name) or name == BUILTIN:
        raise UsageError(
            f"{root}: {name!r} is no name for a task pack; lower-case letters, digits and underscores, a letter first, at "
            f'most 40. Set it in {CARD}: {{"name": "mine"}}'
        )
    return Pack(name, root)


def _object(path: Path) -> Mapping[str, Any]:
    """Return the JSON object in a file; empty where there is no file."""
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as e:
        raise UsageError(f"{path}: not JSON ({e})") from e
    if not isinstance(found, dict):
        raise UsageError(f"{path}: a JSON object is expected, found a {type(found).__name__}")
    return found


@functools.lru_cache(maxsize=64)
def _splits(root: Path) -> Mapping[str, str]:
    found = _object(root / "splits.json")
    table = found.get("split", found)
    for local, split in table.items() if isinstance(table, dict) else [("split", table)]:
        if not (isinstance(split, str) and _NAME.fullmatch(split) and split != "all"):
            raise UsageError(f"{root}/splits.json: {local!r} has the split {split!r}; a name in lower case, not 'all'")
    return table


def split_names() -> tuple[str, ...]:
    """Return the names of the splits of all registered packs."""
    return tuple(sorted({s for p in registered() for s in (DEFAULT_SPLIT, *_splits(p.root).values())}))


def check_categories(category: str) -> None:
    """Check the name of a category.

    Args:
        category: in lower case.

    Raises:
        UnknownName: no such category.
    """
    if category not in CATEGORIES:
        raise UnknownName("category", category, CATEGORIES)


def _provide(pack: Pack) -> None:
    """Let the modules of a pack be imported, helpers too: ``from .._helpers import ...``."""
    parent = sys.modules.setdefault(MODULES, ModuleType(MODULES))
    if not hasattr(parent, "__path__"):
        parent.__path__ = []
    name = f"{MODULES}.{pack.name}"
    module = ModuleType(name)
    module.__path__ = [str(pack.root)]
    sys.modules[name] = module
    setattr(parent, pack.name, module)
