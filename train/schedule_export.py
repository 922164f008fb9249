"""Write a policy's schedules as kernels, for the policy ``replay:FILE.jsonl`` of ``eval/report.py``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kbx_env.baselines.search.knobs import with_knobs
from kbx_env.train.schedule_policy import ScheduleAgent, newest

from kbx_env import jsonl
from kbx_env.errors import UnknownName, UsageError
from kbx_env.options import SIZES
from kbx_env.spec.catalog import expert_source, load_tasks

STATE = "state.json"
"""File of a checkpoint with its counts and the best schedules so far."""


@dataclass
class ExportSettings:
    """Settings of the export."""

    checkpoint: str = ""
    """A run's folder or one of its checkpoints."""
    tasks: str = "*"
    """Glob over task ids, comma-separated; tasks without an expert are left out."""
    split: str = "all"
    """train, eval or all tasks."""
    out: str = "schedules.jsonl"
    """File of the schedules; the unchanged experts go to ``NAME.default.jsonl`` beside it."""
    best: bool = False
    """For tasks of the training, export the best schedule that was graded in training instead of the policy's choice."""
    sizes: str = "published"
    """The timed sizes that the policy chooses for: published or held-out."""


def export(settings: ExportSettings) -> tuple[Path, Path, list[dict[str, Any]]]:
    """Write the schedules of a policy, and beside them the unchanged experts.

    Args:
        settings: the settings.

    Returns:
        The two files, and the rows of the first.

    Raises:
        UsageError: no checkpoint, no such task or sizes, or a file that cannot be written.
    """
    if not settings.checkpoint:
        raise UsageError("export needs checkpoint=DIR, a run's out= folder or one in its checkpoints/")
    if settings.sizes not in SIZES:
        raise UnknownName("sizes", settings.sizes, SIZES)
    agent = ScheduleAgent.load(settings.checkpoint)
    best = best_of(newest(settings.checkpoint)) if settings.best else {}
    tasks = [t.id for t in load_tasks(split=settings.split, pattern=settings.tasks) if expert_source(t.id) is not None]
    rows, plain = [], []
    for task in tasks:
        expert = agent.template(task).source
        chosen = best.get(task, {}).get("settings")
        how = "policy" if chosen is None else "best of training"
        chosen = agent.settings(task, settings.sizes) if chosen is None else chosen
        rows.append({"task": task, "predict": with_knobs(expert, chosen), "settings": chosen, "how": how})
        plain.append({"task": task, "predict": expert, "settings": {}, "how": "default"})
    out = Path(settings.out)
    beside = out.with_name(f"{out.stem}.default{out.suffix}")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        for file, lines in ((out, rows), (beside, plain)):
            jsonl.write(file, lines)
    except OSError as e:
        raise UsageError(f"cannot write {settings.out!r}: {e}") from e
    return out, beside, rows


def best_of(checkpoint: Path) -> Mapping[str, Mapping[str, Any]]:
    """Return by task the best schedule that was graded in training: ``settings``, ``value`` and ``default`` (rewards).

    Args:
        checkpoint: folder of a checkpoint.

    Returns:
        The schedules.

    Raises:
        UsageError: the checkpoint has no such record.
    """
    try:
        found: Mapping[str, Mapping[str, Any]] = json.loads((checkpoint / STATE).read_text())["best"]
    except (OSError, ValueError, KeyError) as e:
        raise UsageError(f"the checkpoint {str(checkpoint)!r} does not tell the best schedules of its training") from e
    return found
