"""Compare reward presets: train once for each preset and seed, then compare metrics that mean the same under all presets.

    python train/compare_rewards.py --presets default,fusion --tasks 'fusion/*' --seeds 5 --config train/configs/grpo.yaml \\
        --out runs/compare [key=value ... for the learner]
    python train/compare_rewards.py --out runs/compare --report-only

Each run is ``train/grpo.py CONFIG reward=PRESET tasks=GLOB seed=K out=OUT/PRESET-seedK key=value ...``. After Ctrl-C the same
command continues: finished runs are skipped, the interrupted one resumes. Seeds and presets may be added later. The other presets
are compared with the first. Writes ``comparison.json``, ``.md``, ``.png`` and ``.svg``; docs/rewards.md explains them.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import fcntl
import importlib
import importlib.metadata
import inspect
import json
import os
import platform
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from kbx_env.eval import plot_style
from kbx_env.rewards.compose import load_preset
from kbx_env.train import reward_curves, reward_report, settings

from kbx_env.errors import KbxError, UsageError
from kbx_env.spec.catalog import load_tasks

LEARNER = Path(__file__).resolve().parent / "grpo.py"
"""The script that trains."""
RECORD, LOCK, OUTPUT = "experiment.json", ".lock", "output"
"""In the folder of an experiment: its record, its lock, and the folder for the output of runs."""
OURS = ("reward", "tasks", "seed", "out", "resume")
"""Settings of the learner that this script sets."""
GRACE = 60.0
"""Seconds between SIGINT and SIGTERM, for an interrupted learner to end by itself."""


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--presets", help="comma-separated; the others are compared with the first")
    p.add_argument("--tasks", default="*", help="glob over task ids of the train split, comma-separated")
    p.add_argument("--seeds", type=int, help="runs of each preset, with seeds 0, 1, ...")
    p.add_argument("--config", help="settings of the learner, a YAML file")
    p.add_argument("--out", required=True, help="folder of the runs and of the comparison")
    p.add_argument("--report-only", action="store_true", help="train nothing, compare the runs that are there")
    p.add_argument("--learner", default=str(LEARNER), help=argparse.SUPPRESS)
    p.add_argument("words", nargs="*", metavar="key=value", help="settings of the learner, over those of the file")
    return p


@dataclasses.dataclass(frozen=True)
class Experiment:
    """An experiment: its runs and their settings."""

    presets: tuple[str, ...]
    seeds: int
    out: Path
    config: str
    tasks: str
    learner: str
    words: tuple[str, ...]
    record: Mapping[str, Any]
    """Settings that all runs in a folder share, as they are kept there."""

    def runs(self) -> list[tuple[str, int]]:
        """Return preset and seed of each run: all presets of a seed come before the next seed, so that partial results compare."""
        return [(p, k) for k in range(self.seeds) for p in self.presets]

    def command(self, preset: str, seed: int, resume: bool) -> list[str]:
        """Return the command of one run.

        Args:
            preset: its preset.
            seed: its seed.
            resume: whether it continues from its newest checkpoint.

        Returns:
            The command's words.
        """
        own = [f"reward={preset}", f"tasks={self.tasks}", f"seed={seed}", f"out={self.out / name_of(preset, seed)}"]
        return [sys.executable, self.learner, self.config, *own, *self.words, *(["resume=last"] if resume else [])]


def name_of(preset: str, seed: int) -> str:
    """Return the name of a run's folder."""
    return f"{preset}-seed{seed}"


def experiment(a: argparse.Namespace) -> Experiment:
    """Check the command line and return the experiment, before anything runs.

    Args:
        a: the parsed command line.

    Returns:
        The experiment.

    Raises:
        UsageError: an option that cannot be used, or the folder holds another experiment.
    """
    for option, like in (("presets", "default,fusion"), ("seeds", "5"), ("config", "train/configs/grpo.yaml")):
        if getattr(a, option) is None:
            raise UsageError(f"--{option} is needed (all but --report-only); give --{option} {like}")
    presets = _presets(a.presets)
    if a.seeds < 1:
        raise UsageError(f"--seeds is {a.seeds}; at least 1, and 5 or more for intervals worth reading")
    ids = [t.id for t in load_tasks(split="train", pattern=a.tasks)]
    for word in a.words:
        if "=" not in word:
            raise UsageError(f"{word!r} is no setting of the learner; write key=value")
        if word.partition("=")[0] in OURS:
            raise UsageError(f"{word!r}: {word.partition('=')[0]} is set by this script; use its options (--help)")
    if not Path(a.learner).is_file():
        raise UsageError(f"no learner {a.learner}")
    if not Path(a.config).is_file():
        raise UsageError(f"no settings file {a.config!r}; --config takes a YAML file of the learner")
    _check_settings(a.learner, [a.config, *a.words, f"reward={presets[0]}", f"tasks={a.tasks}", "seed=0", "out=x"])
    plot_style.check()
    record = {
        "tasks": a.tasks, "task_ids": ids, "config": Path(a.config).read_text(encoding="utf-8"), "words": list(a.words),
        "weights": {p: {**load_preset(p).weights, **load_preset(p).shaping} for p in presets},
    }  # fmt: skip
    _check_folder(Path(a.out), record)
    return Experiment(presets, a.seeds, Path(a.out), a.config, a.tasks, a.learner, tuple(a.words), record)


def _presets(text: str) -> tuple[str, ...]:
    names = tuple(n.strip() for n in text.split(",") if n.strip())
    for n in names:
        load_preset(n)
    if len(names) < 2 or len(set(names)) < len(names):
        raise UsageError(f"--presets is {text!r}; at least two different ones, such as default,fusion")
    return names


def _check_settings(learner: str, argv: Sequence[str]) -> None:
    """Check the learner's settings. A learner other than ``LEARNER`` checks them itself at its first run."""
    if Path(learner).resolve() != LEARNER:
        return
    try:
        module = importlib.import_module("kbx_env.train.grpo")
    except ImportError as e:
        raise UsageError(f"train/grpo.py cannot be loaded: {e}") from e
    for kind in vars(module).values():
        if inspect.isclass(kind) and dataclasses.is_dataclass(kind):
            if set(OURS) <= {f.name for f in dataclasses.fields(kind)}:
                settings.read(kind, argv)


def _check_folder(out: Path, record: Mapping[str, Any]) -> None:
    if out.exists() and not out.is_dir():
        raise UsageError(f"--out {out} is a file; give a folder")
    earlier = _read(out)
    if earlier is None:
        if out.is_dir() and any(p.name != LOCK for p in out.iterdir()):
            raise UsageError(f"--out {out} is not empty and holds no experiment of this script; give another folder")
        return
    for key in ("tasks", "task_ids", "config", "words"):
        if earlier.get(key) != record[key]:
            raise UsageError(f"--out {out} is in use by another experiment (its {key} differ); give another folder")
    for preset, weights in record["weights"].items():
        if earlier["weights"].get(preset, weights) != weights:
            raise UsageError(f"--out {out} holds runs of {preset!r} with other weights; give another folder")


def _read(out: Path) -> dict[str, Any] | None:
    path = out / RECORD
    try:
        return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None  # type: ignore[no-any-return]
    except ValueError as e:
        raise UsageError(f"{path} cannot be read: {e}; give another folder") from e


def _write(path: Path, text: str) -> None:
    part = path.with_name(path.name + ".part")
    part.write_text(text, encoding="utf-8")
    os.replace(part, path)


@contextlib.contextmanager
def _alone(out: Path) -> Iterator[int]:
    """Hold the folder's lock. Learners inherit it, so that a learner that outlives this script keeps a second script away."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        lock = os.open(out / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as e:
        raise UsageError(f"cannot write to --out {out}: {e.strerror}") from e
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as e:
            raise UsageError(f"--out {out} is in use by a running experiment; wait for it, or give another folder") from e
        yield lock
    finally:
        os.close(lock)


def train(x: Experiment) -> None:
    """Do all runs that are not finished.

    Args:
        x: the experiment.

    Raises:
        UsageError: the learner refuses its settings.
        KbxError: the learner failed; its output is in ``OUT/output``.
        KeyboardInterrupt: interrupted; the learner has ended, and its checkpoints are kept.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    with _alone(x.out) as lock:
        record = _read(x.out) or {"finished": {}}
        record = {**x.record, "presets": x.presets, "weights": {**record.get("weights", {}), **x.record["weights"]},
                "finished": record["finished"]}  # fmt: skip
        _write(x.out / RECORD, json.dumps(record, indent=1))
        (x.out / OUTPUT).mkdir(exist_ok=True)
        todo = [r for r in x.runs() if name_of(*r) not in record["finished"]]
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=Console(stderr=True)) as bar:
            row = bar.add_task("runs", total=len(x.runs()), completed=len(x.runs()) - len(todo))
            for preset, seed in todo:
                folder = x.out / name_of(preset, seed)
                begin = time.monotonic()
                for line in _learn(x, preset, seed, lock):
                    bar.update(row, description=f"{preset}, seed {seed}: {line}")
                reward_curves.lines_of(folder)
                record["finished"][folder.name] = {"wall": round(time.monotonic() - begin, 1), **_environment(folder)}
                _write(x.out / RECORD, json.dumps(record, indent=1))
                bar.advance(row)


def _learn(x: Experiment, preset: str, seed: int, lock: int) -> Iterator[str]:
    """Run the learner to its end; yield its progress as text several times a second."""
    folder = x.out / name_of(preset, seed)
    output = x.out / OUTPUT / f"{folder.name}.txt"
    resume = folder.is_dir() and any(folder.iterdir())
    with output.open("ab") as file:
        # In a session of its own: Ctrl-C then reaches the learner only once, by _stop.
        child = subprocess.Popen(
            x.command(preset, seed, resume), stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT,
            start_new_session=True, pass_fds=(lock,),
        )  # fmt: skip
        try:
            while True:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(0.3)
                    break
                yield _latest(folder)
        finally:
            _stop(child)
    if child.returncode in (130, -signal.SIGINT):
        raise KeyboardInterrupt
    if child.returncode:
        last = [t for t in output.read_text(errors="replace").splitlines() if t.strip()][-1:] or ["it said nothing"]
        text = f"the run {folder.name} failed (exit status {child.returncode}): {last[0][:400]}; all it said: {output}"
        raise UsageError(text) if child.returncode == 2 else KbxError(text)


def _stop(child: subprocess.Popen[bytes]) -> None:
    """End a learner and its child processes: by SIGINT, then by SIGTERM, then by SIGKILL."""
    for number, seconds in ((signal.SIGINT, GRACE), (signal.SIGTERM, 10.0), (signal.SIGKILL, 10.0)):
        if child.poll() is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(seconds)


def _latest(folder: Path) -> str:
    """Return the progress of a run by the last line of its log."""
    try:
        with (folder / "log.jsonl").open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 8192))
            line = json.loads(file.read().splitlines()[-1])
        rate = line.get("correct_rate")
        return f"{line['gradings']} gradings" + ("" if rate is None else f", {plot_style.percent(rate)} correct")
    except (OSError, ValueError, LookupError, TypeError):
        return "beginning"


def _environment(folder: Path) -> dict[str, Any]:
    """Return device, versions and model of a run that has just ended on this machine."""
    import torch
    from omegaconf import OmegaConf

    from kbx_env import versions

    saved: Any = {}
    with contextlib.suppress(Exception):  # another learner may save no settings
        saved = OmegaConf.load(folder / settings.FILE)
    backend = saved.get("backend")
    backend = backend if backend in ("cpu", "cuda") else "cuda" if torch.cuda.is_available() else "cpu"
    found = versions.environment(backend)
    if torch.cuda.is_available():  # the learner uses the GPU, also where grading is on the CPU
        found["device"] = torch.cuda.get_device_name(0)
    for library in ("transformers", "trl"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[library] = importlib.metadata.version(library)
    return {"environment": found, "backend": backend, "model": saved.get("model"), "cores": os.cpu_count()}


def report(out: Path, presets: Sequence[str] | None = None, seeds: int | None = None) -> dict[str, Any]:
    """Compare the finished runs of a folder and write the comparison.

    Args:
        out: the folder.
        presets: presets to compare, the first one with each other; by default those of the experiment.
        seeds: only seeds below this number; by default all.

    Returns:
        The comparison, as in ``comparison.json``.

    Raises:
        UsageError: no runs, a preset without a finished one, or a log that is not that of a run.
    """
    record = _read(out)
    presets = tuple(presets or (record or {}).get("presets", ()))
    if not presets:
        raise UsageError(f"{out} holds no experiment; name the presets of its runs with --presets")
    logs: dict[tuple[str, int], list[dict[str, Any]]] = {}
    unfinished = []
    for preset in presets:
        for folder in out.glob(f"{preset}-seed*"):
            number = folder.name.removeprefix(f"{preset}-seed")
            if not re.fullmatch(r"\d+", number) or seeds is not None and int(number) >= seeds:
                continue
            if record is not None and folder.name not in record["finished"]:
                unfinished.append(folder.name)
                continue
            logs[preset, int(number)] = reward_curves.lines_of(folder)
        if not any(p == preset for p, _ in logs):
            raise UsageError(f"no finished run of {preset!r} in {out}; nothing to compare")
    order = {p: k for k, p in enumerate(presets)}
    logs = {k: logs[k] for k in sorted(logs, key=lambda k: (order[k[0]], k[1]))}
    runs, terms = reward_curves.runs_of(logs, load_preset(presets[0]).weights)
    comparison = reward_curves.compare(runs)
    comparison |= {"base_terms": terms, "unfinished": sorted(unfinished), "about": _about(record, runs, unfinished)}
    comparison["conclusion"] = reward_report.conclusion(comparison)
    _write(out / "comparison.json", json.dumps(comparison, indent=1, allow_nan=False))
    reward_report.write(comparison, out)
    return comparison


def _about(record: Mapping[str, Any] | None, runs: Sequence[reward_curves.Run], unfinished: Sequence[str]) -> dict[str, str]:
    """Return the facts about how the runs were made, for the report."""
    if record is None:
        return {"Runs": "made without this script: device, versions and settings are not recorded"}
    finished = [record["finished"][name_of(r.preset, r.seed)] for r in runs]

    def of(key: str) -> str:
        return ", ".join(dict.fromkeys(str(m.get(key)) for m in finished if m.get(key)))

    libraries = [
        ", ".join(f"{k} {v[:12]}" for k, v in m["environment"].items() if k not in ("device", "machine")) for m in finished
    ]
    return {
        "Tasks": f"`{record['tasks']}`, {len(record['task_ids'])} of the train split",
        "Model": of("model"), "Settings beyond the file": " ".join(record["words"]),
        "Device": ", ".join(dict.fromkeys(m["environment"]["device"] for m in finished))
                  + f" ({platform.machine()}, {of('cores')} cores), backend {of('backend')}",
        "Versions": " / ".join(dict.fromkeys(libraries)),
        "Left out, not finished": ", ".join(sorted(unfinished)),
    }  # fmt: skip


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; exit status 0 when compared, 1 when a learner failed, 2 on bad usage, 130 when interrupted."""
    a = parser().parse_intermixed_args(argv)
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        if a.report_only:
            plot_style.check()
            if a.words:
                raise UsageError(f"--report-only trains nothing: {a.words[0]!r} has no use")
            comparison = report(Path(a.out), _presets(a.presets) if a.presets else None, a.seeds)
        else:
            x = experiment(a)
            train(x)
            comparison = report(x.out, x.presets, x.seeds)
        print("\n".join(comparison["conclusion"]))
        print(f"report: {Path(a.out) / 'comparison.md'}")
    except KeyboardInterrupt:
        print(f"interrupted; the same command goes on, --report-only --out {a.out} shows what is finished", file=sys.stderr)
        return 130
    except KbxError as e:
        print(f"compare_rewards.py: {e}", file=sys.stderr)
        return 2 if isinstance(e, UsageError) else 1
    finally:
        signal.signal(signal.SIGTERM, before)
    return 0


if __name__ == "__main__":
    sys.exit(main())
