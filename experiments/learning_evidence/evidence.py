"""One run of `train_evidence.py`: its folders, time, child processes and result files."""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import math
import os
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.learning_evidence.budget import GRACE, Budget, Ended, say, together
from kbx_env import jsonl

ROOT = Path(__file__).resolve().parents[2]
"""The repository."""
MOST = 16 << 20
"""Largest result file in bytes."""
SECTIONS = ("build", "sft", "grpo", "ppo")
"""Sections of ``--config``."""


def lines_of(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a JSONL file, without incomplete ones; empty where there is no file."""
    return jsonl.read(path, skip_broken=True) if path.is_file() else []


def plain(value: Any) -> Any:
    """Return a value as strict JSON has it: numbers that are not finite become ``None``."""
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def replace(path: Path, value: Any, most: int = MOST) -> None:
    """Write a JSON file atomically. Of one that is too large every second row is left out, as often as ``halved`` in it says.

    Args:
        path: the file.
        value: its content.
        most: largest size in bytes.
    """
    value, times = plain(value), 0
    while len(text := json.dumps(value, allow_nan=False)) > most:
        value, times = _halved(value), times + 1
        if times > 20:
            value = {"left out": f"{len(text)} bytes"}
    if times:
        text = json.dumps({"halved": times, **(value if isinstance(value, dict) else {"rows": value})})
    part = path.with_name(path.name + ".part")
    part.write_text(text)
    os.replace(part, path)


def _halved(value: Any) -> Any:
    if isinstance(value, list):
        return value[::2] if len(value) > 3 else value
    return {k: _halved(v) for k, v in value.items()} if isinstance(value, dict) else value


def gpus_here() -> list[str]:
    """Return the names of the visible GPUs, as ``CUDA_VISIBLE_DEVICES`` takes them."""
    import torch

    count = torch.cuda.device_count()
    devices = [d for d in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if d]
    return devices[:count] if len(devices) >= count else [str(k) for k in range(count)]


class Evidence:
    """One run of the script.

    ``result``, ``training`` and ``files`` become evidence.json, training.json, and one file for each name. Each step puts a
    function into ``collectors`` that updates them from the work folder: called with ``False`` every 15 s, with ``True`` at the end.
    """

    def __init__(self, a: argparse.Namespace) -> None:
        """Make the folders.

        Args:
            a: options of the command line.
        """
        import torch
        from omegaconf import OmegaConf

        self.a, self.cuda = a, torch.cuda.is_available()
        self.gpus = gpus_here() if self.cuda else []
        self.parts = a.parts.split(",")
        self.modes = [m for m in ("single", "multi") if m in self.parts]
        self.steps = [s for s in ("sft", "grpo", "shaping", "report", "ppo") if s in self.parts or (s == "grpo" and self.modes)]
        self.budget = Budget(60 * a.minutes, self.steps)
        self.work = Path(a.work or tempfile.mkdtemp(prefix="kbx-evidence-")).absolute()
        self.work.mkdir(parents=True, exist_ok=True)
        a.out.mkdir(parents=True, exist_ok=True)
        self.more: dict[str, Any] = OmegaConf.to_container(OmegaConf.load(a.config)) if a.config else {}  # type: ignore[assignment]
        if unknown := set(self.more) - set(SECTIONS):
            raise SystemExit(f"--config {a.config}: unknown section {', '.join(unknown)}; known: {', '.join(SECTIONS)}")
        self.cores = os.cpu_count() or 1
        # Continue from the checkpoint of an earlier command in this folder.
        before = self.work / "sft/final"
        self.model: Path | None = Path(a.model).absolute() if a.model else before if before.is_dir() else None
        self.result: dict[str, Any] = {
            "date": time.strftime("%Y-%m-%d"), "arguments": {k: str(v) for k, v in vars(a).items()}, "config": self.more,
            "device": torch.cuda.get_device_name(0) if self.cuda else "cpu", "gpus": len(self.gpus), "cores": self.cores,
            "python": sys.version.split()[0], "versions": _versions(), "finished": False, "steps": {}, "failures": {},
        }  # fmt: skip
        self.training: dict[str, Any] = {}
        self.files: dict[str, Any] = {}
        self.collectors: dict[str, Callable[[bool], None]] = {}
        # One thread for each process: there are more processes than cores.
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        self.env = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1", "PYTHONPATH": path}

    def keep(self, last: bool = False) -> None:
        """Update and write all result files.

        Args:
            last: whether the step is over.
        """
        for name, collect in self.collectors.items():
            try:
                collect(last)
                self.result["failures"].pop(f"{name}, collecting", None)
            except Exception:
                self.result["failures"][f"{name}, collecting"] = traceback.format_exc()[-2000:]
        self.result["seconds"] = round(self.budget.elapsed, 1)
        for name, value in {**self.files, "training": self.training, "evidence": self.result}.items():
            replace(self.a.out / f"{name}.json", value)

    def settings(self, section: str, name: str, ours: Mapping[str, Any], fixed: Mapping[str, Any]) -> str:
        """Write a YAML file with settings of a script, and return its path.

        Args:
            section: section of ``--config``, which takes precedence over ``ours``.
            name: name of the file.
            ours: defaults of this script.
            fixed: settings that must be the same for the comparison; they take precedence over the section.

        Returns:
            The path.
        """
        from omegaconf import OmegaConf

        file = self.work / f"{name}.yaml"
        file.write_text(OmegaConf.to_yaml(OmegaConf.merge(ours, self.more.get(section, {}), fixed)))
        return str(file)

    def job(self, name: str, seconds: float, **job: Any) -> list[str]:
        """Write the file of a job and return the command of its child process.

        Args:
            name: name of the job.
            seconds: its time; the child ends by itself a little before it would be stopped.
            **job: content of the file.

        Returns:
            The command's words.
        """
        file = self.work / f"{name}.json"
        until = time.time() + max(1.0, seconds - min(GRACE, seconds / 4) - 4)
        file.write_text(json.dumps({**job, "until": until}))
        script = Path(__file__).with_name("train_evidence.py")
        return [sys.executable, str(script), str(self.a.out), "--child", str(file)]

    def run(
        self, step: str, commands: Mapping[str, Sequence[str]], seconds: float, progress: Callable[[], str] = lambda: ""
    ) -> None:
        """Run commands side by side, update the result files every 15 s, and record how the commands ended.

        Args:
            step: name of the step.
            commands: the commands, by name.
            seconds: their time.
            progress: returns their progress as text.
        """
        say(f"{step}: {', '.join(commands)}; {seconds:.0f} s")

        def updated() -> str:
            self.keep()
            return progress()

        together(commands, seconds, self.work / "said", progress=updated, on_end=self._ended, env=self.env, gpus=self.gpus)

    def _ended(self, name: str, end: Ended) -> None:
        self.result["steps"][name] = {"status": end.status, "seconds": end.seconds, "stopped": end.stopped}
        if end.stopped:
            say(f"{name}: stopped, ended after {end.seconds} s with status {end.status}")
        elif end.status:
            self.result["failures"][name] = end.tail
            say(f"{name}: exit status {end.status}: {end.tail.strip()[-600:]}")

    def all(self, how: Mapping[str, Callable[[Evidence], None]]) -> int:
        """Do all steps; a step that fails does not keep the others from running.

        Args:
            how: a function of this object for each step.

        Returns:
            The exit status.
        """
        self.keep()
        try:
            for name in self.steps:
                try:
                    how[name](self)
                except Exception as e:
                    self.result["failures"][name] = traceback.format_exc()[-2000:]
                    say(f"{name} failed: {type(e).__name__}: {e}")
                finally:
                    self.keep(last=True)
                    self.collectors.clear()
            self.result["finished"] = True
            self.keep()
        finally:
            if not self.a.work:
                shutil.rmtree(self.work, ignore_errors=True)
        say(f"{len(self.result['failures'])} failures; {self.a.out}")
        return 1 if self.result["failures"] else 0


def _versions() -> dict[str, str]:
    found = {}
    for name in ("torch", "triton", "transformers", "trl", "accelerate", "ray", "gymnasium"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found
