"""What lists and prompts say of a task, without importing it: the declarations import torch, which takes seconds.

``tasks/summaries.json`` keeps one row for each task of the benchmark; ``python docs/generate.py`` writes it. A row of a
task whose declaration changed since is not used: the task is loaded instead, as are the tasks of packs.
"""

from __future__ import annotations

import ast
import functools
import inspect
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import kbx_env.tasks
from kbx_env.spec import catalog
from kbx_env.spec.task import Task

FILE = Path(next(iter(kbx_env.tasks.__path__))) / "summaries.json"
"""By task id: the fields of ``Summary`` but ``id`` and ``spec``, and the ``fingerprint`` of the declaration."""


@dataclass(frozen=True)
class Summary:
    """A task, as lists and prompts show it.

    Attributes:
        id: ``category/name`` or ``category/pack.name``.
        entry: name of the function.
        signature: its parameters, in parentheses.
        spec: the contract.
        difficulty: 1 (easy) to 5.
        judge: name of the judge of results.
        cases: number of declared cases.
    """

    id: str
    entry: str
    signature: str
    spec: str
    difficulty: int
    judge: str
    cases: int


def summary(task_id: str) -> Summary:
    """Describe a task.

    Args:
        task_id: the full id (``catalog.full_id``).

    Returns:
        The summary, from the file where it is up to date.
    """
    row = dict(_rows().get(task_id, {}))
    if not row or row.pop("fingerprint") != catalog.fingerprint(task_id):
        return summarised(catalog.load_task(task_id))
    return Summary(id=task_id, spec=_contract(task_id, row["entry"]), **row)


def summarised(task: Task) -> Summary:
    """Return the summary of a task that is loaded."""
    return Summary(
        task.id, task.entry, str(task.signature), task.spec, task.difficulty, task.truth.judge, len(task.cases)
    )  # fmt: skip


def text() -> str:
    """Return the text of ``FILE``, from the declarations."""
    rows = []
    for task in map(catalog.load_task, catalog.task_ids("builtin")):
        fields = {k: v for k, v in asdict(summarised(task)).items() if k not in ("id", "spec")}
        rows.append(f"  {json.dumps(task.id)}: {json.dumps({'fingerprint': task.fingerprint} | fields)}")
    return "{\n" + ",\n".join(rows) + "\n}\n"


@functools.cache
def _rows() -> Mapping[str, Mapping[str, Any]]:
    return json.loads(FILE.read_text()) if FILE.exists() else {}


def _contract(task_id: str, entry: str) -> str:
    """Return the docstring of the function ``entry`` in the file of a task."""
    module = ast.parse(catalog.source_file(task_id).read_text())
    found = next(node for node in module.body if isinstance(node, ast.FunctionDef) and node.name == entry)
    return inspect.cleandoc(ast.get_docstring(found, clean=False) or "")
