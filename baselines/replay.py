"""The policy ``replay``: kernels from a file of JSON lines, ``{"task" | "file", "predict"}``, KernelBenchX's format."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kbx_env.baselines.llm.access import Access

from kbx_env import jsonl
from kbx_env.envs.answer import strip_fences
from kbx_env.errors import UsageError
from kbx_env.spec.catalog import task_ids
from kbx_env.spec.task import CATEGORIES

NAME = "replay"


def task_of(row: Mapping[str, Any]) -> str | None:
    """Return the id of the task that a row names under ``task`` or ``file``; ``None`` where there is no such task."""
    raw = str(row.get("task") or row.get("file") or "").strip().replace("\\", "/").removesuffix(".py").lower()
    *folders, name = raw.split("/")
    category = folders[-1] if folders else ""
    ids = {t.lower(): t for t in task_ids()}
    if f"{category}/{name}" in ids:
        return ids[f"{category}/{name}"]
    if category in CATEGORIES:  # the category is known and lacks the task: do not take one of another category
        return None
    names = [t for key, t in ids.items() if key.rsplit("/", 1)[-1] == name]
    return names[0] if len(names) == 1 else None


def source_of(row: Mapping[str, Any]) -> str:
    """Return the source in a row's ``predict``, with an alias if the row says that its function has another name."""
    source = strip_fences(str(row["predict"]))
    entry, written = row.get("entry"), row.get("entry_in_source")
    if isinstance(entry, str) and isinstance(written, str) and entry != written:
        if entry.isidentifier() and written.isidentifier():
            source += f"\n\n{entry} = {written}\n"
    return source


class Replay:
    """Answers a task with its rows of the file, in order; a task without a row gets no answer.

    Attributes:
        warnings: what was wrong with rows that were skipped, by line.
        sources: the sources of each task, in the file's order.
    """

    name = NAME
    repeatable = True

    def __init__(self, path: str) -> None:
        """Read a file. Rows that cannot be used are skipped, with a warning on standard error.

        Args:
            path: the file.

        Raises:
            UsageError: there is no such file, or it has no usable row.
        """
        file = Path(path)
        if not file.is_file():
            raise UsageError(f"no replay file {path!r}; expected JSON lines with task (or file) and predict")
        self.warnings: list[str] = []
        self.sources: dict[str, list[str]] = {}
        for number, line in jsonl.numbered(file):
            self._add(file, number, line)
        for warning in self.warnings:
            print(f"{path}: {warning}", file=sys.stderr)
        if not self.sources:
            raise UsageError(f"replay file {path!r} has no usable row")

    def _add(self, file: Path, number: int, line: str) -> None:
        try:
            row = jsonl.parse(file, number, line)
        except jsonl.NotJson as e:
            self.warnings.append(f"line {number}: not JSON ({e.reason})")
            return
        if not isinstance(row, dict) or not isinstance(row.get("predict"), str):
            self.warnings.append(f"line {number}: no text under 'predict'")
            return
        task = task_of(row)
        if task is None:
            self.warnings.append(f"line {number}: no task named {str(row.get('task') or row.get('file'))!r}")
            return
        self.sources.setdefault(task, []).append(source_of(row))

    @property
    def answered(self) -> frozenset[str]:
        """The tasks that have a row."""
        return frozenset(self.sources)

    def samples(self, task: str) -> int:
        """Return the number of the task's rows; 1 where it has none, so that a report counts a missing answer."""
        return max(1, len(self.sources.get(task, [])))

    def act(self, observation: Mapping[str, Any]) -> str | None:
        """Return a row of the task: row ``sample`` in a report, the next one on every turn; ``None`` after the last."""
        rows = self.sources.get(observation["task"], [])
        index = int(observation.get("sample", 0)) + int(observation.get("turn", 0))
        return rows[index] if index < len(rows) else None


def build(argument: str | None, access: Access) -> Replay:
    """Make the policy.

    Args:
        argument: the file.
        access: not used.

    Returns:
        The policy.

    Raises:
        UsageError: there is no argument, no such file, or no usable row in it.
    """
    if not argument:
        raise UsageError("policy 'replay' needs a file: replay:FILE.jsonl")
    return Replay(argument)
