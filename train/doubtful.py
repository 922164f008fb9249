"""Demonstrations of a model that half knows: right kernels with faults at a few places, each there or not by chance.

    python train/doubtful.py out=runs/doubtful tasks='quantization/*' places=8 odds=0.6 rows=400 workers=2

A model that is trained on them writes kernels that compile, run and are mostly wrong: each place is faulty in ``odds`` of its
answers, none in (1 - odds)^places. This is where experiments on what is paid to wrong kernels can begin (``compare_rewards.py``).
A fault is another operator or a constant twice as large. Chance chooses the places, among the faults that alone make a kernel
wrong and not crash; what a reward makes of them has no part in it. The tasks are those of the train split.
"""

from __future__ import annotations

import contextlib
import json
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if __package__ in (None, ""):  # run as a script from a clone
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from kbx_env.train import data
from kbx_env.train.breaking import Fault, places, with_faults
from kbx_env.train.compact import compact
from kbx_env.train.rows import about, message, write
from kbx_env.train.settings import command

from kbx_env.catalog import expert_source, splits
from kbx_env.errors import UsageError
from kbx_env.outcome import Outcome, Verdict
from kbx_env.store import Store
from kbx_env.task import Task

if TYPE_CHECKING:
    from datasets import Dataset

KINDS = ("operator", "number")
"""Faults that a kernel can survive."""
PLACES = "places.json"
_ROUND = 3
"""Times as many faults as are still lacking are graded at once."""


@dataclass(frozen=True)
class Doubts:
    """A task's kernel, and where it may be faulty."""

    task: Task
    source: str
    faults: tuple[Fault, ...]


def doubts(
    tasks: Sequence[Task], count: int, seed: int = 0, *, workers: int = 1, store: Store | None = None, progress: bool = True,
    grade: Callable[..., Outcome] | None = None,
) -> list[Doubts]:  # fmt: skip
    """The project's kernels of some tasks with ``count`` places each; a task without a kernel or with fewer is left out.

    Args:
        tasks: of the train split.
        count: places of each kernel.
        seed: of the choice.
        workers: gradings at a time.
        store: keeps the gradings.
        progress: show a bar on stderr, if that is a terminal.
        grade: stands in for the real grader in tests.

    Raises:
        UsageError: a task of the eval split, or a grading that the machine lost: places must not depend on that.
    """
    if evil := [t.id for t in tasks if splits().get(t.id) != "train"]:
        raise UsageError(f"no demonstrations of tasks outside the train split: {', '.join(evil[:5])}; use split='train'")
    found: dict[str, Doubts] = {}
    waiting: dict[str, list[Fault]] = {}
    for task in tasks:
        if (expert := expert_source(task.id)) is not None:
            source = compact(expert, task.entry)
            found[task.id] = Doubts(task, source, ())
            waiting[task.id] = places(source, KINDS)
            random.Random(f"{seed} {task.id} places").shuffle(waiting[task.id])
    while True:
        asked: list[tuple[Doubts, Fault]] = []
        for name, one in found.items():
            lacking = _ROUND * (count - len(one.faults))
            asked += [(one, f) for f in waiting[name][:lacking] if _apart(f, one.faults)]
            waiting[name] = waiting[name][max(0, lacking) :]
        if not asked:
            return [d for d in found.values() if len(d.faults) == count]
        texts = [(d.task, "doubtful", with_faults(d.source, [f])) for d, f in asked]
        for (one, fault), outcome in zip(asked, data.graded(texts, workers, store, progress, grade), strict=True):
            if outcome.verdict is Verdict.INFRA_FAULT:
                raise UsageError(f"the machine lost a grading of {one.task.id}: {outcome.message[:200]}; give the command again")
            had = found[one.task.id].faults
            if outcome.verdict is Verdict.INCORRECT and len(had) < count and _apart(fault, had):
                found[one.task.id] = Doubts(one.task, one.source, (*had, fault))


def _apart(fault: Fault, others: Sequence[Fault]) -> bool:
    return all(fault.end <= o.begin or o.end <= fault.begin for o in others)


def demonstrations(made: Sequence[Doubts], odds: float, count: int, seed: int = 0, backend: str = "cpu") -> Dataset:
    """``count`` rows of each kernel, with the columns of ``data.demonstrations``; ``variation`` has a 1 for each faulty place."""
    from datasets import Dataset

    rows = list[dict[str, Any]]()
    for one in made:
        draw = random.Random(f"{seed} {one.task.id} rows")
        for _ in range(count):
            faulty = [draw.random() < odds for _ in one.faults]
            text = with_faults(one.source, [f for f, there in zip(one.faults, faulty, strict=True) if there])
            name = f"doubtful-{''.join(str(int(b)) for b in faulty)}"
            shown = {"prompt": [message(one.task, backend)], "completion": [data.answer(text)]}
            rows.append({**shown, "variation": name, **about(one.task)})
    return Dataset.from_list(rows)


@dataclass
class Settings(data.Common):
    """Of this script."""

    places: int = 8
    """Of each kernel that may be faulty."""
    odds: float = 0.5
    """With which each is."""
    rows: int = 400
    """Of each kernel."""


def run(s: Settings) -> None:
    """Write the rows and say where each kernel may be faulty."""
    if min(s.places, s.rows, s.workers) < 1 or not 0 < s.odds < 1:
        raise UsageError(
            f"places is {s.places}, rows is {s.rows}, workers is {s.workers}, odds is {s.odds}; at least 1, and between 0 and 1"
        )
    tasks = data.chosen(s)
    out = data.folder(s)
    with contextlib.closing(Store(out / "gradings.sqlite")) as store:
        made = doubts(tasks, s.places, s.seed, workers=s.workers, store=store)
    if not made:
        raise UsageError(f"none of {len(tasks)} tasks has a kernel with {s.places} such places; give fewer, or other tasks")
    told = {d.task.id: [asdict(f) | {"line": line_of(d.source, f)} for f in d.faults] for d in made}
    (out / PLACES).write_text(json.dumps(told, indent=1))
    rows = demonstrations(made, s.odds, s.rows, s.seed, s.backend)
    right = sum(not str(v).partition("-")[2].strip("0") for v in rows["variation"])
    print(f"{write(rows, out / 'demonstrations', s.format)}: {len(rows)} rows of {len(made)} tasks, {right} without a fault")
    if left := sorted({t.id for t in tasks} - told.keys()):
        print(f"left out, with fewer than {s.places} places or no kernel: {', '.join(left)}")


def line_of(source: str, fault: Fault) -> str:
    """The line of a source that a fault is in, the fault marked."""
    begin, end = source.rfind("\n", 0, fault.begin) + 1, source.find("\n", fault.end)
    return f"{source[begin : fault.begin]}[{source[fault.begin : fault.end]} -> {fault.text}]{source[fault.end : end]}".strip()


def main(argv: Sequence[str] | None = None) -> int:
    """Exit 0 when written, 2 on bad usage, 130 when interrupted: go on with the same command."""
    return command("doubtful.py", Settings, __doc__, run, argv)


if __name__ == "__main__":
    sys.exit(main())
