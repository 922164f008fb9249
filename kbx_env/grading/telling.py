"""Which declared cases say something about a kernel: those that no constant and no copy of an input would pass.

That depends on the declaration only, and takes seconds for some tasks, so ``tasks/telling.json`` keeps it. An entry of a
task whose declaration changed since is not used; ``python eval/telling.py --write`` brings it up to date.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import kbx_env.tasks
from kbx_env.grading import inputs
from kbx_env.grading import judge as judges
from kbx_env.spec import packs
from kbx_env.spec.task import Task

FILE = Path(next(iter(kbx_env.tasks.__path__))) / "telling.json"
"""By task id: ``fingerprint`` of the declaration, and ``telling``, a 1 or a 0 for each declared case."""


@functools.cache
def _entries(file: Path) -> Mapping[str, Mapping[str, Any]]:
    return json.loads(file.read_text()) if file.exists() else {}


def _entry(task_id: str) -> Mapping[str, Any] | None:
    """Return the entry of a task: a pack has a file of its own, by ``category/name``, or none."""
    pack, local = packs.pack_of(task_id), packs.split_id(task_id)[1]
    return _entries(pack.root / FILE.name if pack else FILE).get(local)


@functools.cache
def is_telling(task: Task, index: int) -> bool:
    """Return whether no constant and no copy of an input would be right in a declared case, whatever inputs are drawn.

    Args:
        task: the task.
        index: number of the case in ``task.cases``.

    Returns:
        Whether passing the case says anything about the kernel.
    """
    entry = _entry(task.id)
    if entry is not None and entry["fingerprint"] == task.fingerprint and len(entry["telling"]) == len(task.cases):
        return bool(entry["telling"][index] == "1")
    return computed(task, index)


def computed(task: Task, index: int) -> bool:
    """Return what ``is_telling`` returns, from the judge and not from the file; arguments as there."""
    case = task.cases[index]
    return not judges.is_trivial(task, case, inputs.draw(task, case, 2**32 + index))
