"""Files of a run of ``train/ppo.py``: its log, the record of steps, the best schedules, checkpoints."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kbx_env.train.schedule_export import STATE
from kbx_env.train.schedule_policy import CHECKPOINTS, About, newest, save_policy

from kbx_env.errors import UsageError

LOG, BEST, GREEDY, RUN, STORE, STEPS = (
    "log.jsonl", "schedules.json", "greedy.json", "run.json", "gradings.sqlite", "steps.jsonl",
)  # fmt: skip
"""Files in the folder of a run."""
RLLIB = "rllib"
"""Folder of RLlib's own state, in a checkpoint."""
KEEP = 2
"""Checkpoints that are kept: the last one, and one more in case that one is damaged."""


@dataclass
class Progress:
    """Counts of a run so far, and its best schedules."""

    iteration: int = 0
    steps: int = 0
    gradings: int = 0
    seconds: float = 0.0
    offset: int = 0
    """Bytes of the record of steps that have been read."""
    log: int = 0
    """Bytes of the log."""
    best: dict[str, dict[str, Any]] = field(default_factory=dict)

    def take(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Count the rows of an iteration, as the record of steps has them, and return its line of the log."""
        self.iteration += 1
        self.steps += len(rows)
        self.gradings += sum(r["gradings"] for r in rows)
        known = [r for r in rows if not r["masked"] and r["value"] is not None]
        for r in known:
            best = self.best.get(r["task"])
            # Of equal rewards the schedule with fewer changes wins: numbers that make no difference stay the expert's.
            if r["correct"] and (best is None or _worth(r) > _worth(best)):
                self.best[r["task"]] = {k: r[k] for k in ("settings", "value", "default")}
        pairs = [(r["value"], r["default"]) for r in known if r["default"] is not None]
        return {
            "iteration": self.iteration, "steps": self.steps, "gradings": self.gradings,
            "reward": _mean([r["value"] for r in known]), "default": _mean([d for _, d in pairs]),
            "gain": _mean([v - d for v, d in pairs]), "correct": _mean([float(r["correct"]) for r in known]),
            "masked": len(rows) - len(known),
        }  # fmt: skip


def _worth(row: Mapping[str, Any]) -> tuple[float, int]:
    return round(row["value"], 9), -len(row["settings"])


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None


def restore(out: Path) -> tuple[Progress, Path | None]:
    """Read the newest checkpoint, and cut log and record of steps to its length.

    The steps after it are done again; their gradings come from the store.

    Args:
        out: folder of the run.

    Returns:
        The progress, and the checkpoint's folder; ``None`` where there is none yet.

    Raises:
        UsageError: the checkpoint is not one of ``train/ppo.py``.
    """
    folder: Path | None = None
    progress = Progress()
    with contextlib.suppress(UsageError):  # killed before the first one
        folder = newest(out)
    if folder is not None:
        try:
            progress = Progress(**json.loads((folder / STATE).read_text()))
        except (OSError, ValueError, TypeError) as e:
            raise UsageError(f"{str(folder)!r} is no checkpoint of train/ppo.py: {STATE}: {e}"[:300]) from e
    for name, size in ((LOG, progress.log), (STEPS, progress.offset)):
        if (out / name).exists():
            os.truncate(out / name, size)
    return progress, folder


def rows_of(file: Path, offset: int) -> tuple[list[dict[str, Any]], int]:
    """Read the rows of a JSONL file from an offset on.

    Args:
        file: the file, which may not exist yet.
        offset: where to start, in bytes.

    Returns:
        The complete rows, and the offset of their end.
    """
    if not file.exists():
        return [], offset
    with file.open("rb") as f:
        f.seek(offset)
        data = f.read()
    data = data[: data.rfind(b"\n") + 1]
    return [json.loads(line) for line in data.splitlines()], offset + len(data)


def save_checkpoint(algorithm: Any, about: About, progress: Progress, out: Path) -> None:
    """Write a checkpoint atomically, and remove old ones.

    Args:
        algorithm: RLlib's algorithm.
        about: how the policy is trained.
        progress: the progress of the run.
        out: folder of the run.
    """
    final = out / CHECKPOINTS / f"{progress.iteration:06d}"
    part = final.with_suffix(".part")
    for old in (part, final):
        shutil.rmtree(old, ignore_errors=True)
    part.mkdir(parents=True)
    algorithm.save_to_path(str((part / RLLIB).absolute()))
    save_policy(part, algorithm.get_module().net.cpu().state_dict(), about)
    write(part / STATE, dataclasses.asdict(progress))
    os.replace(part, final)
    for old in sorted(p for p in (out / CHECKPOINTS).glob("[0-9]*") if p.name.isdigit())[:-KEEP]:
        shutil.rmtree(old, ignore_errors=True)


def write(file: Path, value: Any) -> None:
    """Write a JSON file atomically."""
    part = file.with_name(file.name + ".part")
    part.write_text(json.dumps(value, indent=1))
    os.replace(part, file)
