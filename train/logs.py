"""The log of a training run: one JSON object a line. Weights & Biases may mirror it."""

from __future__ import annotations

import importlib.util
import math
import os
import time
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from kbx_env import jsonl
from kbx_env.errors import UsageError
from kbx_env.extras import install_hint

FILE = "log.jsonl"
"""File of the log, in the folder of a run."""


class JsonlLog(TrainerCallback):
    """Writes ``log.jsonl``: ``step``, ``epoch``, ``seconds`` of training so far, and the trainer's own log of that step.

    A resumed run drops the lines after its checkpoint, so that the file has every step once. Numbers that are not finite are
    ``null``.
    """

    def __init__(self, folder: str | Path) -> None:
        """A log in the folder of a run."""
        self.path = Path(folder) / FILE
        self._began, self._before = time.monotonic(), 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Keep the lines up to the step that training starts from."""
        if not state.is_world_process_zero:
            return
        kept = [line for line in read(self.path.parent) if line["step"] <= state.global_step] if state.global_step else []
        self._before = kept[-1]["seconds"] if kept else 0.0
        self._began = time.monotonic()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        jsonl.write(self.path, kept)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Write one line."""
        if not state.is_world_process_zero:
            return
        seconds = round(self._before + time.monotonic() - self._began, 3)
        line = {"step": state.global_step, "epoch": _plain(state.epoch), "seconds": seconds}
        line |= {k: _plain(v) for k, v in (logs or {}).items() if k not in line}
        jsonl.append(self.path, line)


def read(folder: str | Path) -> list[dict[str, Any]]:
    """Return the lines of the log in a folder; empty where there is none. Incomplete lines of a killed run are left out."""
    path = Path(folder) / FILE
    return jsonl.read(path, skip_broken=True) if path.is_file() else []


def mirrors(wandb: bool, folder: str | Path) -> list[str]:
    """Return the value of the trainer's ``report_to``. Without an account wandb writes into the folder, for ``wandb sync``.

    Args:
        wandb: whether Weights & Biases mirrors the log.
        folder: folder of the run.

    Returns:
        Names of the loggers; empty for none.

    Raises:
        UsageError: ``wandb`` is set and the package is not installed.
    """
    if not wandb:
        return []
    if importlib.util.find_spec("wandb") is None:
        raise UsageError(f"wandb=true needs wandb: {install_hint('wandb')}, or leave it out: log.jsonl is written anyway")
    home = Path(folder).absolute()  # wandb makes a folder wandb/ in it
    if not os.environ.get("WANDB_API_KEY"):
        os.environ.setdefault("WANDB_MODE", "offline")
    os.environ.setdefault("WANDB_LOG_MODEL", "false")
    os.environ.setdefault("WANDB_PROJECT", "kbx_env")
    for name, at in (("WANDB_DIR", home), ("WANDB_DATA_DIR", home / "wandb/data"), ("WANDB_CACHE_DIR", home / "wandb/cache")):
        os.environ.setdefault(name, str(at))
    return ["wandb"]


def _plain(value: Any) -> Any:
    """Return a value that JSON can hold."""
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, int | float | str | bool | None) else str(value)
