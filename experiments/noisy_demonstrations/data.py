"""Make demonstrations with random faults: correct kernels in which each of some places is faulty or not, by chance.

    python experiments/noisy_demonstrations/data.py out=runs/doubtful tasks='quantization/*' places=8 odds=0.6 rows=400 workers=2

A model that is trained on them writes kernels that compile, run and are mostly wrong: each place is faulty in a share ``odds`` of
its answers, and no place in (1 - odds)^places of them. Comparisons of rewards for wrong kernels (``train/compare_rewards.py``)
start from such a model. A fault is another operator or a constant twice as large. The places are drawn from the faults that alone
make a kernel wrong but not crash; no reward takes part in the choice. The tasks are those of the train split. With ``kinds``
faults may keep a kernel from running, and with ``repairs`` there are rows for answers in several turns.
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
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from kbx_env.baselines.llm.conversation import follow_up
from kbx_env.train import data
from kbx_env.train.mutation import KINDS, Fault, fault_sites, with_faults
from kbx_env.train.rows import about, message, write
from kbx_env.train.settings import command

from experiments.small_models.compact import compact
from kbx_env.envs.prompt import feedback
from kbx_env.errors import UnknownName, UsageError
from kbx_env.outcome import Outcome, Verdict
from kbx_env.spec.catalog import expert_source, splits
from kbx_env.spec.task import Task
from kbx_env.store import Store

if TYPE_CHECKING:
    from datasets import Dataset

RUNNING = ("operator", "number")
"""Kinds of faults with which a kernel can still run."""
PLACES = "places.json"
"""File with the places of each task, beside the demonstrations."""
_ROUND = 3
"""In one round so many times the number of missing faults are graded."""


@dataclass(frozen=True)
class NoisyKernel:
    """A task's kernel and the faults that it may have."""

    task: Task
    source: str
    faults: tuple[Fault, ...]


def noisy_kernels(
    tasks: Sequence[Task], count: int, seed: int = 0, *, workers: int = 1, store: Store | None = None, progress: bool = True,
    grade: Callable[..., Outcome] | None = None, kinds: Sequence[str] = RUNNING,
) -> list[NoisyKernel]:  # fmt: skip
    """Choose faults in the project's kernels of some tasks.

    Args:
        tasks: tasks of the train split.
        count: faults of each kernel.
        seed: seed of the choice.
        workers: gradings at a time.
        store: keeps the gradings.
        progress: show a progress bar on stderr, if that is a terminal.
        grade: replaces the real grader in tests.
        kinds: kinds of faults, of ``mutation.KINDS``. If all of them are in ``RUNNING``, the kernel must run with each fault and
            be wrong; else it may also fail to compile or raise.

    Returns:
        The kernels; a task without a kernel or with fewer faults is left out.

    Raises:
        UsageError: a task of the eval split, or a grading that the machine lost: the choice must not depend on that.
        UnknownName: no such kind.
    """
    if evaluated := [t.id for t in tasks if splits().get(t.id) != "train"]:
        raise UsageError(f"no demonstrations of tasks outside the train split: {', '.join(evaluated[:5])}; use split='train'")
    for kind in kinds:
        if kind not in KINDS:
            raise UnknownName("kind of fault", kind, KINDS)
    wanted = (Verdict.INCORRECT,) if set(kinds) <= set(RUNNING) else data.MISTAKES
    found: dict[str, NoisyKernel] = {}
    waiting: dict[str, list[Fault]] = {}
    for task in tasks:
        if (expert := expert_source(task.id)) is not None:
            source = compact(expert, task.entry)
            found[task.id] = NoisyKernel(task, source, ())
            waiting[task.id] = fault_sites(source, kinds)
            random.Random(f"{seed} {task.id} places").shuffle(waiting[task.id])
    while True:
        trials: list[tuple[NoisyKernel, Fault]] = []
        for name, one in found.items():
            lacking = _ROUND * (count - len(one.faults))
            trials += [(one, f) for f in waiting[name][:lacking] if _apart(f, one.faults)]
            waiting[name] = waiting[name][max(0, lacking) :]
        if not trials:
            return [d for d in found.values() if len(d.faults) == count]
        texts = [(d.task, "doubtful", with_faults(d.source, [f])) for d, f in trials]
        for (one, fault), outcome in zip(trials, data.graded(texts, workers, store, progress, grade), strict=True):
            if outcome.verdict is Verdict.INFRA_FAULT:
                raise UsageError(f"the machine lost a grading of {one.task.id}: {outcome.message[:200]}; give the command again")
            had = found[one.task.id].faults
            if outcome.verdict in wanted and len(had) < count and _apart(fault, had):
                found[one.task.id] = NoisyKernel(one.task, one.source, (*had, fault))


def _apart(fault: Fault, others: Sequence[Fault]) -> bool:
    """Return whether a fault overlaps none of the others."""
    return all(fault.end <= o.begin or o.end <= fault.begin for o in others)


def demonstrations(
    made: Sequence[NoisyKernel], odds: float, count: int, seed: int = 0, backend: str = "cpu", *, repairs: int = 0,
    verdicts: Callable[[list[tuple[Task, str, str]]], list[Outcome]] | None = None,
) -> Dataset:  # fmt: skip
    """Make rows with the columns of ``train/data.py``; ``variation`` has a 1 for each fault that is there.

    Args:
        made: the kernels.
        odds: probability of each fault.
        count: rows of each kernel with a single answer.
        seed: seed of the draws.
        backend: ``cpu`` or ``cuda``: the instruction that is shown.
        repairs: rows of each kernel in which a wrong answer and its feedback come first. The answer after it is drawn like any
            other, so that a trained model answers again but has not learnt to use the feedback.
        verdicts: grades earlier answers; needed for ``repairs``.

    Returns:
        The rows.

    Raises:
        UsageError: a grading of an earlier answer that the machine lost: rows must not depend on that.
    """
    from datasets import Dataset

    rows = list[dict[str, Any]]()
    for one in made:
        draw = random.Random(f"{seed} {one.task.id} rows")

        def drawn(one: NoisyKernel = one, draw: random.Random = draw) -> tuple[str, str]:
            faulty = [draw.random() < odds for _ in one.faults]
            text = with_faults(one.source, [f for f, there in zip(one.faults, faulty, strict=True) if there])
            return "".join(str(int(b)) for b in faulty), text

        for _ in range(count):
            bits, text = drawn()
            shown = {"prompt": [message(one.task, backend)], "completion": [data.answer(text)]}
            rows.append({**shown, "variation": f"doubtful-{bits}", **about(one.task)})
        pairs = list[tuple[tuple[str, str], tuple[str, str]]]()
        while len(pairs) < repairs:
            first = drawn()
            pairs += [(first, drawn())] if "1" in first[0] else []
        earlier = {bits: text for (bits, text), _ in pairs}
        outcomes = verdicts([(one.task, f"doubtful-{b}", t) for b, t in earlier.items()]) if verdicts and earlier else []
        if lost := [o for o in outcomes if o.verdict is Verdict.INFRA_FAULT]:
            raise UsageError(f"the machine lost a grading of {one.task.id}: {lost[0].message[:200]}; give the command again")
        replies = {b: follow_up(feedback(o)) for b, o in zip(earlier, outcomes, strict=True) if o.verdict in data.MISTAKES}
        for (before, wrong), (bits, text) in pairs:
            if before not in replies:
                continue  # two faults may cancel out, or end in another verdict than an honest mistake
            asks = [message(one.task, backend), data.answer(wrong), {"role": "user", "content": replies[before]}]
            again = {"prompt": asks, "completion": [data.answer(text)]}
            rows.append({**again, "variation": f"doubtful-{bits}-after-{before}", **about(one.task)})
    return Dataset.from_list(rows)


@dataclass
class Settings(data.Common):
    """Settings of this script."""

    kinds: str = ",".join(RUNNING)
    """Kinds of faults, comma-separated: operator, number, name, line, bracket. With the last three kernels may fail to run."""
    places: int = 8
    """Places of each kernel that may be faulty."""
    odds: float = 0.5
    """Probability of each fault."""
    rows: int = 400
    """Rows of each kernel with a single answer."""
    repairs: int = 0
    """More rows of each kernel, in which a wrong answer and its feedback come first: for answers in several turns."""


def run(s: Settings) -> None:
    """Write the rows and the places of each kernel, and print a summary."""
    if min(s.places, s.rows, s.workers) < 1 or s.repairs < 0 or not 0 < s.odds < 1:
        raise UsageError(
            f"places is {s.places}, rows is {s.rows}, workers is {s.workers}, repairs is {s.repairs}, odds is {s.odds}; "
            "at least 1, 1, 1 and 0, and between 0 and 1"
        )
    kinds = [k.strip() for k in s.kinds.split(",")]
    tasks = data.chosen(s)
    out = data.folder(s)
    with contextlib.closing(Store(out / "gradings.sqlite")) as store:
        made = noisy_kernels(tasks, s.places, s.seed, workers=s.workers, store=store, kinds=kinds)
        if not made:
            raise UsageError(f"none of {len(tasks)} tasks has a kernel with {s.places} such places; give fewer, or other tasks")
        rows = demonstrations(
            made, s.odds, s.rows, s.seed, s.backend, repairs=s.repairs,
            verdicts=lambda sources: data.graded(sources, s.workers, store, True, None),
        )  # fmt: skip
    places = {d.task.id: [asdict(f) | {"line": line_of(d.source, f)} for f in d.faults] for d in made}
    (out / PLACES).write_text(json.dumps(places, indent=1))
    right = sum("1" not in str(v).split("-")[1] for v in rows["variation"])
    print(f"{write(rows, out / 'demonstrations', s.format)}: {len(rows)} rows of {len(made)} tasks, {right} without a fault")
    if left := sorted({t.id for t in tasks} - places.keys()):
        print(f"left out, with fewer than {s.places} places or no kernel: {', '.join(left)}")


def line_of(source: str, fault: Fault) -> str:
    """Return the line of a source with a fault, the fault marked as ``[old -> new]``.

    Args:
        source: the source without faults.
        fault: the fault.

    Returns:
        The line, without the whitespace around it.
    """
    begin, end = source.rfind("\n", 0, fault.begin) + 1, source.find("\n", fault.end)
    return f"{source[begin : fault.begin]}[{source[fault.begin : fault.end]} -> {fault.text}]{source[fault.end : end]}".strip()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; exit status 0 when written, 2 on bad usage, 130 when interrupted (the same command continues)."""
    return command("data.py", Settings, __doc__, run, argv)


if __name__ == "__main__":
    sys.exit(main())
