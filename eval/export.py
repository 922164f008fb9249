"""Writes the benchmark as a Hugging Face dataset folder: prompts, tasks, experts and their verdicts.

    kbx export runs/dataset --report runs/expert
    python -c "import datasets; print(datasets.load_dataset('runs/dataset', 'prompts'))"

Held-out cases and sizes stay out. Every row and the card hold a canary string (docs/dataset.md).
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kbx_env.eval import report_data
from kbx_env.eval.pages.render import render

from kbx_env import versions
from kbx_env.envs.prompt import instruction
from kbx_env.errors import UnknownName, UsageError
from kbx_env.executor.batch import grade_many
from kbx_env.extras import install_hint
from kbx_env.outcome import Outcome
from kbx_env.spec import packs
from kbx_env.spec.catalog import expert_source, load_tasks, splits
from kbx_env.spec.task import Task

CANARY = "kbx_env canary 90cb1154-1c49-42eb-9e45-a8c573404bbc: benchmark data must not be in training corpora"
"""In every row and in the card: who filters a corpus can find the data by it. The GUID never changes."""
CARD = "README.md"
EXPERT = "expert"
"""The policy whose rows a report must hold."""
CONFIGS: Mapping[str, Mapping[str, type]] = {
    "prompts": {"task": str, "category": str, "difficulty": int, "backend": str, "prompt": str},
    "tasks": {
        "task": str, "category": str, "difficulty": int, "entry": str, "signature": str, "contract": str, "judge": str,
        "differs": str, "cases": list, "timed": list, "fingerprint": str,
    },
    "experts": {"task": str, "category": str, "difficulty": int, "source": str},
    "verdicts": {
        "task": str, "category": str, "difficulty": int, "verdict": str, "backend": str, "device": str, "grading": str,
        "speedup": float, "low": float, "high": float, "torch": str, "triton": str, "kbx_env": str, "source_sha256": str,
    },
}  # fmt: skip
"""Config -> column -> type; ``list`` is a list of texts. Each config also has the column ``canary``."""


@dataclass(frozen=True)
class Export:
    """A written dataset.

    Attributes:
        folder: of the dataset.
        rows: config -> number of rows.
    """

    folder: Path
    rows: Mapping[str, int]


def export(
    folder: str | Path, *, backend: str = "cpu", report: str | Path | None = None, outcomes: Mapping[str, Outcome] | None = None,
    overwrite: bool = False,
) -> Export:  # fmt: skip
    """Write the tasks of the selected packs, by default the benchmark, as a dataset.

    Args:
        folder: of the dataset; new or empty.
        backend: ``cpu`` or ``cuda``: whether the prompts say that kernels are timed.
        report: folder of a report with the policy ``expert``, from which the verdicts come.
        outcomes: gradings of experts by task, in its place. Without both, the config ``verdicts`` is left out.
        overwrite: replace an earlier export in the folder.

    Returns:
        The dataset.

    Raises:
        UsageError: pyarrow is missing, the folder is not empty or cannot be written, or the report is of other experts.
    """
    if backend not in ("cpu", "cuda"):
        raise UnknownName("backend", backend, ("cpu", "cuda"))
    out = Path(folder)
    _pyarrow()
    if out.exists() and not out.is_dir():
        raise UsageError(f"{out} is a file; give a folder")
    if out.is_dir() and any(out.iterdir()) and not overwrite:
        raise UsageError(f"{out} is not empty; give another folder, or --overwrite to replace an earlier export")
    if overwrite and (out / CARD).is_file() and CANARY not in (out / CARD).read_text(encoding="utf-8", errors="replace"):
        raise UsageError(f"{out / CARD} is not the card of an export; give another folder")
    tasks = load_tasks()
    configs = {
        "prompts": [{**_common(t), "backend": backend, "prompt": instruction(t, backend)} for t in tasks],
        "tasks": [_task(t) for t in tasks],
        "experts": [{**_common(t), "source": source} for t in tasks if (source := expert_source(t.id)) is not None],
    }
    if report is not None or outcomes is not None:
        found = outcomes if outcomes is not None else _reported(Path(str(report)))
        configs["verdicts"] = [_verdict(t, found[t.id]) for t in tasks if t.id in found]
    known = splits()
    files: dict[str, list[str]] = {}
    try:
        for name in CONFIGS:
            for old in (out / name).glob("*.parquet") if overwrite else ():
                old.unlink()
        for name, rows in configs.items():
            for split in sorted({known[r["task"]] for r in rows}):
                _write(out / name / f"{split}.parquet", CONFIGS[name], [r for r in rows if known[r["task"]] == split])
                files.setdefault(name, []).append(split)
        card = render("dataset.md.j2", canary=CANARY, configs=files, rows={n: len(r) for n, r in configs.items()},
                      task_set=versions.task_set(t.id for t in tasks), backend=backend, total=len(tasks))  # fmt: skip
        (out / CARD).write_text(card, encoding="utf-8")
    except OSError as e:
        raise UsageError(f"cannot write {folder}: {e.strerror or e}; choose another folder") from e
    return Export(out, {n: len(r) for n, r in configs.items()})


def _common(t: Task) -> dict[str, Any]:
    return {"task": t.id, "category": t.category, "difficulty": t.difficulty}


def _task(t: Task) -> dict[str, Any]:
    """Return the row of a task without its held-out cases and sizes."""
    return {
        **_common(t), "entry": t.entry, "signature": str(t.signature), "contract": t.spec, "judge": t.truth.judge,
        "differs": t.differs, "cases": [c.label() for c in t.cases if not c.held], "timed": [c.label() for c in t.timed],
        "fingerprint": t.fingerprint,
    }  # fmt: skip


def _verdict(t: Task, o: Outcome) -> dict[str, Any]:
    timing = o.timing if o.timing is not None and not o.timing.void else None
    return {
        **_common(t), "verdict": str(o.verdict), "backend": o.backend, "grading": o.grading,
        "speedup": timing and timing.speedup, "low": timing and timing.low, "high": timing and timing.high,
        **{k: o.manifest.get(k) for k in ("device", "torch", "triton", "kbx_env")}, "source_sha256": o.source_sha256,
    }  # fmt: skip


def _reported(report: Path) -> dict[str, Outcome]:
    """Return the experts' outcomes of a report, which must be of the present expert kernels."""
    study = report_data.read(report)
    policy = next((p for p in study.policies if p.spec == EXPERT), None)
    if policy is None:
        known = ", ".join(p.spec for p in study.policies)
        raise UsageError(f"{report} has no policy {EXPERT!r} (it has: {known}); write one with: kbx report --policy {EXPERT}")
    found = {r.task: Outcome.from_dict(r.raw) for r in policy.rows}
    other = [
        t for t, o in found.items()
        if o.source_sha256 != hashlib.sha256((expert_source(t) or "").encode()).hexdigest()
    ]  # fmt: skip
    if other:
        raise UsageError(f"{report} graded other expert kernels of {', '.join(other[:3])} ({len(other)} in all); grade them anew")
    return found


def _graded(backend: str, workers: int | None) -> dict[str, Outcome]:
    """Grade all experts, with a progress bar."""
    pairs = [(t.id, source) for t in load_tasks() if (source := expert_source(t.id)) is not None]
    outcomes = grade_many(pairs, workers=workers, backend=backend, targets=("sm_90",))
    return {task: outcome for (task, _), outcome in zip(pairs, outcomes, strict=True)}


def _pyarrow() -> tuple[Any, Any]:
    try:
        return importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")
    except ImportError as e:
        raise UsageError(f"kbx export needs pyarrow: {install_hint('parquet')}") from e


def _write(path: Path, columns: Mapping[str, type], rows: Iterable[Mapping[str, Any]]) -> None:
    """Write rows with their canary; the types are stated, because a column may hold nothing but nulls."""
    pa, pq = _pyarrow()
    types = {str: pa.string(), int: pa.int64(), float: pa.float64(), list: pa.list_(pa.string())}
    schema = pa.schema([*((name, types[kind]) for name, kind in columns.items()), ("canary", pa.string())])
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    pq.write_table(pa.Table.from_pylist([{**r, "canary": CANARY} for r in rows], schema), part)
    part.replace(path)


def main(argv: Sequence[str] | None = None) -> int:
    """Write a dataset; return 0 when it is written, 2 on bad usage."""
    p = argparse.ArgumentParser(description="Write the benchmark as a Hugging Face dataset folder.")
    p.add_argument("folder", metavar="DIR", help="folder of the dataset, new or empty")
    p.add_argument("--backend", default="cpu", help="cpu (default), or cuda: whether prompts and gradings are timed")
    p.add_argument("--report", metavar="REPORT", help="folder of a report with the policy expert: adds the config verdicts")
    p.add_argument("--grade", action="store_true", help="grade all experts for the config verdicts, instead of --report")
    p.add_argument("--workers", type=int, help="gradings at a time with --grade (default: what the cores allow)")
    p.add_argument("--tasks-from", metavar="PACK", help="task packs: folders or names, comma-separated (default: KBX_TASKS)")
    p.add_argument("--overwrite", action="store_true", help="replace an earlier export in the folder")
    a = p.parse_args(argv)
    try:
        if a.grade and a.report:
            raise UsageError("--grade and --report exclude each other: verdicts come from one of them")
        if a.tasks_from is not None:
            packs.select(a.tasks_from)
        graded = _graded(a.backend, a.workers) if a.grade else None
        made = export(a.folder, backend=a.backend, report=a.report, outcomes=graded, overwrite=a.overwrite)
    except UsageError as e:
        print(f"export: {e}", file=sys.stderr)
        return 2
    left = "" if "verdicts" in made.rows else "; no verdicts: add --report DIR or --grade"
    print(f"dataset: {made.folder} ({', '.join(f'{n} {k}' for k, n in made.rows.items())}{left})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
