"""Make demonstrations for small models: compact sources, and copies under made-up names.

    python experiments/small_models/data.py out=runs/small/data variations=0 style=compact copies=200 workers=8

Has the settings of ``train/data.py`` and those that only experiments need.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # run as a script
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from kbx_env.train import data
from kbx_env.train.mutation import broken
from kbx_env.train.rows import message
from kbx_env.train.settings import command

from experiments.small_models.compact import compact
from experiments.small_models.copying import copies as copied
from experiments.small_models.copying import translated
from kbx_env.errors import UnknownName
from kbx_env.outcome import Outcome
from kbx_env.spec.catalog import load_tasks
from kbx_env.spec.task import Task
from kbx_env.store import Store

COPY = "copy"
"""How the ``variation`` of a row begins that shows another row's kernel under other names."""
STYLES = ("plain", "compact")


@dataclass
class Settings(data.Settings):
    """Settings of this script."""

    style: str = "plain"
    """compact: no comments, no unused functions, one way to break lines; for models of build_model.py tokens=lines."""
    copies: int = 0
    """Copies of each demonstration under made-up names in prompt and answer. They teach a small model to read the names."""


def demonstrations(
    tasks: Sequence[Task], *, backend: str = "cpu", variations: int = 4, seed: int = 0, workers: int = 1,
    store: Store | None = None, progress: bool = True, grade: Callable[..., Outcome] | None = None, style: str = "plain",
    copies: int = 0, repairs: int = 0,
) -> data.Demonstrations:  # fmt: skip
    """Make rows as ``train/data.py`` makes them, in another style and with copies.

    Args:
        tasks: tasks of the train split.
        backend: ``cpu`` or ``cuda``: the instruction that the prompts show.
        variations: variations of each kernel, in addition to the kernel itself, before grading.
        seed: seed of the variations, faults and names.
        workers: gradings at a time.
        store: keeps the gradings.
        progress: show a progress bar on stderr, if that is a terminal.
        grade: replaces the real grader in tests.
        style: ``plain``, or ``compact``: without comments, unused functions and the kernels' own formatting.
        copies: copies of each accepted row, with other names for the entry function and its parameters. They are not graded.
        repairs: wrong versions of each accepted kernel, before grading. Each copy shows one of them, in turn.

    Returns:
        The rows, and what was left out.

    Raises:
        UsageError: a task of the eval split, a count out of its range, or no candidate is accepted.
        UnknownName: no such backend or style.
    """
    data.check(tasks, backend, workers, variations=variations, copies=copies, repairs=repairs)
    if style not in STYLES:
        raise UnknownName("style", style, STYLES)

    def grade_all(proposed: Sequence[data.Candidate]) -> list[Outcome]:
        return data.graded(proposed, workers, store, progress, grade)

    proposed = data.candidates(tasks, variations, seed, compact if style == "compact" else None)
    taken, refused = data.accepted(proposed, grade_all(proposed))
    mistakes = data.wrong_versions(taken, repairs, seed, grade_all)
    rows = list[dict[str, Any]]()
    for one in taken:
        wrong = mistakes.get((one.task.id, one.variation), {})
        instruction = message(one.task, backend)
        rows.append(data.row([instruction], one))
        for k, (source, reply) in wrong.items():
            rows.append(data.row(
                data.repair_messages(instruction, source, reply), one, f"{data.REPAIR}-{k}-{one.variation}"
            ))  # fmt: skip
        names = f"{seed} {one.variation} {one.task.id}"
        for number, (renamed, source) in enumerate(copied(one.task, one.source, copies, names, entries())):
            rows += _copy_rows(one, number, renamed, source, wrong, backend=backend, repairs=repairs, seed=seed)
    return data.collected(rows, proposed, refused, tasks)


def _copy_rows(
    one: data.Candidate, number: int, renamed: Task, source: str, wrong: dict[int, tuple[str, str]], *, backend: str, repairs: int,
    seed: int,
) -> list[dict[str, Any]]:  # fmt: skip
    """Return the rows of one copy: the copy itself and, where its original has wrong versions, one repair."""
    prefix, shown = f"{COPY}-{number}-", one._replace(source=source)
    instruction = message(renamed, backend)
    rows = [data.row([instruction], shown, prefix + one.variation)]
    versions = list(wrong.items())
    if versions:
        k, (mistake, reply) = versions[(number + 1) % len(versions)]
        its_mistake = broken(source, repairs, data.fault_seed(seed, one))[k][1]
        if (its_feedback := translated(reply, mistake, one.task, its_mistake, renamed)) is not None:
            messages = data.repair_messages(instruction, its_mistake, its_feedback)
            rows.append(data.row(messages, shown, f"{prefix}{data.REPAIR}-{k}-{one.variation}"))
    return rows


@functools.cache
def entries() -> frozenset[str]:
    """Return the names of the entry functions of all tasks: a made-up name must be none of them."""
    return frozenset(t.entry for t in load_tasks(split="all"))


def run(s: Settings) -> None:
    """Write both datasets and print a summary."""
    data.write_datasets(s, lambda tasks, store: demonstrations(
        tasks, backend=s.backend, variations=s.variations, seed=s.seed, workers=s.workers, store=store, style=s.style,
        copies=s.copies, repairs=s.repairs,
    ))  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; exit status 0 when written, 2 on bad usage, 130 when interrupted (the same command continues)."""
    return command("data.py", Settings, __doc__, run, argv)


if __name__ == "__main__":
    sys.exit(main())
