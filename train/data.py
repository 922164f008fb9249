"""Make training data: prompts of tasks, and demonstrations that the grader has found correct.

    python train/data.py out=runs/data tasks='*' variations=4 workers=2 seed=0 format=parquet

Demonstrations are the project's own kernels of the train split and variations of them. Each one is graded before it is
accepted. Gradings are kept in ``gradings.sqlite``, so that the same command continues a killed run. Tasks of the eval split
are refused. With ``repairs`` there are also conversations: a wrong answer, the grader's feedback, the correct answer.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from kbx_env.baselines.llm.conversation import follow_up
from kbx_env.train.mutation import broken
from kbx_env.train.renaming import variations as varied
from kbx_env.train.rows import FORMATS, about, by_difficulty, load, message, only, prompts, write
from kbx_env.train.settings import MISSING, command, save

from kbx_env import versions
from kbx_env.envs.prompt import feedback
from kbx_env.errors import UnknownName, UsageError
from kbx_env.executor import Executor, InlinePool, ProcessPool, Request, WorkerPool
from kbx_env.outcome import Fault, Outcome, Verdict
from kbx_env.spec.catalog import expert_source, load_tasks, splits
from kbx_env.spec.packs import BUILTIN
from kbx_env.spec.task import Task
from kbx_env.store import Store

if TYPE_CHECKING:
    from datasets import Dataset

__all__ = ["Demonstrations", "by_difficulty", "demonstrations", "load", "only", "prompts", "write"]
EXPERT = "expert"
"""The ``variation`` of a row that shows the project's kernel unchanged."""
REPAIR = "repair"
"""How the ``variation`` of a row begins in which a wrong answer and its feedback come first."""
MISTAKES = (Verdict.MALFORMED, Verdict.COMPILE_ERROR, Verdict.RUNTIME_ERROR, Verdict.INCORRECT)
"""Verdicts of the wrong answers that repairs show: honest mistakes, no forbidden shortcuts and no timeouts."""
GRADING = {
    "backend": "cpu", "targets": ["sm_90"], "grading": "contract", "seed": None, "timing": False, "split": "train",
    "torch_ops": "strict", "estimate": None,
}  # fmt: skip
"""Grading options for demonstrations. ``split`` is train: the held-out shapes do not choose training data either."""


class Candidate(NamedTuple):
    """A source that becomes a demonstration if the grader finds it correct."""

    task: Task
    variation: str
    source: str


@dataclass(frozen=True)
class Demonstrations:
    """The result of ``demonstrations``."""

    dataset: Dataset
    """The rows."""
    refused: Counter[str]
    """How many candidates were refused, by reason (mostly a verdict)."""
    without: tuple[str, ...]
    """Ids of tasks for which the project has no kernel."""


def demonstrations(
    tasks: Sequence[Task], *, backend: str = "cpu", variations: int = 4, seed: int = 0, workers: int = 1,
    store: Store | None = None, progress: bool = True, grade: Callable[..., Outcome] | None = None, repairs: int = 0,
) -> Demonstrations:  # fmt: skip
    """Make rows for supervised fine-tuning: ``prompt``, ``completion``, ``task``, ``category``, ``difficulty``, ``variation``.

    Args:
        tasks: tasks of the train split.
        backend: ``cpu`` or ``cuda``: the instruction that the prompts show. Grading itself runs on the CPU backend.
        variations: variations of each kernel, in addition to the kernel itself, before grading.
        seed: seed of the variations.
        workers: gradings at a time.
        store: keeps the gradings; with the same store nothing is graded twice.
        progress: show a progress bar on stderr, if that is a terminal.
        grade: replaces the real grader in tests.
        repairs: wrong versions of each accepted kernel, before grading. Each one that the grader refuses becomes a row whose
            prompt has three messages: the instruction, the wrong answer, its feedback.

    Returns:
        The rows, and what was left out.

    Raises:
        UsageError: a task of the eval split, a count out of its range, or no candidate is accepted.
        UnknownName: no such backend.
    """
    check(tasks, backend, workers, variations=variations, repairs=repairs)

    def grade_all(proposed: Sequence[Candidate]) -> list[Outcome]:
        return graded(proposed, workers, store, progress, grade)

    proposed = candidates(tasks, variations, seed)
    taken, refused = accepted(proposed, grade_all(proposed))
    mistakes = wrong_versions(taken, repairs, seed, grade_all)
    rows = list[dict[str, Any]]()
    for one in taken:
        instruction = message(one.task, backend)
        rows.append(row([instruction], one))
        for k, (wrong, reply) in mistakes.get((one.task.id, one.variation), {}).items():
            rows.append(row(repair_messages(instruction, wrong, reply), one, f"{REPAIR}-{k}-{one.variation}"))
    return collected(rows, proposed, refused, tasks)


def check(tasks: Sequence[Task], backend: str, workers: int, **counts: int) -> None:
    """Check what demonstrations are asked for.

    Args:
        tasks: the tasks.
        backend: the backend whose instruction is shown.
        workers: gradings at a time.
        **counts: numbers of variations and so on, by the name of their setting.

    Raises:
        UsageError: a task of the eval split, or a count out of its range.
        UnknownName: no such backend.
    """
    if evaluated := [t.id for t in tasks if splits().get(t.id) != "train"]:
        raise UsageError(f"no demonstrations of tasks outside the train split: {', '.join(evaluated[:5])}; use split='train'")
    if backend not in ("cpu", "cuda"):
        raise UnknownName("backend of prompts", backend, ("cpu", "cuda"))
    if min(counts.values(), default=0) < 0 or workers < 1:
        values = "".join(f"{name} is {count}, " for name, count in counts.items())
        raise UsageError(f"{values}workers is {workers}; workers at least 1, the others at least 0")


def candidates(
    tasks: Sequence[Task], variations: int, seed: int, rewrite: Callable[[str, str], str] | None = None
) -> list[Candidate]:
    """Return the project's kernels of some tasks and variations of them.

    Args:
        tasks: tasks; one without a kernel has no candidates.
        variations: variations of each kernel, in addition to the kernel itself; fewer where it has no more.
        seed: seed of the variations.
        rewrite: a function of a source and the name of its entry function that returns another spelling of each candidate.

    Returns:
        The candidates; those of a task follow each other.
    """
    found = []
    for task in tasks:
        if (expert := expert_source(task.id)) is not None:
            for name, source in [(EXPERT, expert), *varied(expert, task.entry, variations, f"{seed} {task.id}")]:
                found.append(Candidate(task, name, rewrite(source, task.entry) if rewrite else source))
    return found


def accepted(proposed: Sequence[Candidate], outcomes: Sequence[Outcome]) -> tuple[list[Candidate], Counter[str]]:
    """Return the candidates that may be shown, and how many may not, by reason.

    Args:
        proposed: the candidates.
        outcomes: their outcomes, in the same order.

    Returns:
        The accepted candidates, and the counts of the others.
    """
    taken, refused = list[Candidate](), Counter[str]()
    for one, outcome in zip(proposed, outcomes, strict=True):
        if reason := _reason(outcome) or _leak(one.source):
            refused[reason] += 1
        else:
            taken.append(one)
    return taken, refused


def row(messages: Sequence[Mapping[str, str]], one: Candidate, variation: str | None = None) -> dict[str, Any]:
    """Return one row of demonstrations.

    Args:
        messages: the prompt.
        one: the source that the completion shows, and the task that the other columns describe.
        variation: the column ``variation``; by default that of the source.

    Returns:
        The columns of the row.
    """
    return {
        "prompt": list(messages), "completion": [answer(one.source)], "variation": variation or one.variation, **about(one.task)
    }


def repair_messages(instruction: Mapping[str, str], wrong: str, reply: str) -> list[Mapping[str, str]]:
    """Return the prompt of a repair.

    Args:
        instruction: the message that asks for the kernel.
        wrong: source of the wrong answer.
        reply: the grader's feedback on it.

    Returns:
        The three messages.
    """
    return [instruction, answer(wrong), {"role": "user", "content": follow_up(reply)}]


def collected(
    rows: list[dict[str, Any]], proposed: Sequence[Candidate], refused: Counter[str], tasks: Sequence[Task]
) -> Demonstrations:
    """Return the rows as a dataset.

    Args:
        rows: the rows.
        proposed: the candidates that were graded.
        refused: how many of them were refused, by reason.
        tasks: the tasks that demonstrations were asked for.

    Returns:
        The rows, and what was left out.

    Raises:
        UsageError: there is no row.
    """
    if not rows:
        raise UsageError(f"none of {len(proposed)} sources may be shown: {counts_text(refused) or 'no task has a kernel'}")
    from datasets import Dataset

    shown = {one.task.id for one in proposed}
    return Demonstrations(Dataset.from_list(rows), refused, tuple(t.id for t in tasks if t.id not in shown))


def answer(source: str) -> dict[str, str]:
    """Return the message in which a model answers with a module."""
    return {"role": "assistant", "content": f"```python\n{source.strip(chr(10))}\n```"}


def wrong_versions(
    taken: Sequence[Candidate], repairs: int, seed: int, grade_all: Callable[[list[Candidate]], list[Outcome]]
) -> dict[tuple[str, str], dict[int, tuple[str, str]]]:
    """Make wrong versions of accepted sources and keep those that the grader refuses for an honest mistake.

    Args:
        taken: the sources.
        repairs: wrong versions of each, before grading.
        seed: seed of the faults.
        grade_all: grades candidates.

    Returns:
        By task id and variation: number of the version, as ``mutation.broken`` counts them -> its source and the feedback on it.
    """
    proposed, numbers = list[Candidate](), list[int]()
    for one in taken:
        for k, (_, wrong) in enumerate(broken(one.source, repairs, fault_seed(seed, one))):
            proposed.append(one._replace(source=wrong))
            numbers.append(k)
    found: dict[tuple[str, str], dict[int, tuple[str, str]]] = {}
    for k, wrong_one, outcome in zip(numbers, proposed, grade_all(proposed) if proposed else [], strict=True):
        if outcome.verdict in MISTAKES:
            found.setdefault((wrong_one.task.id, wrong_one.variation), {})[k] = wrong_one.source, feedback(outcome)
    return found


def fault_seed(seed: int, one: Candidate) -> str:
    """Return the seed with which ``mutation.broken`` makes the wrong versions of a source."""
    return f"{seed} {one.variation} {one.task.id}"


def graded(
    sources: Sequence[tuple[Task, str, str]], workers: int, store: Store | None, progress: bool,
    grade: Callable[..., Outcome] | None,
) -> list[Outcome]:
    """Grade sources.

    Args:
        sources: for each source its task, a name that is not used, and the text; such as ``Candidate`` s.
        workers: gradings at a time.
        store: keeps the gradings.
        progress: show a progress bar on stderr, if that is a terminal.
        grade: replaces the real grader in tests.

    Returns:
        The outcomes, in the order of the sources.
    """
    here = versions.environment("cpu")
    requests = [
        Request(t.id, text.encode(), GRADING, here | {"fingerprint": t.fingerprint}, "demonstrations")
        for t, _, text in sources
    ]
    with contextlib.ExitStack() as stack:
        pool: WorkerPool
        if grade is not None:
            pool = InlinePool(grade)
        elif store is not None and all(store.get(r.key) for r in requests):
            pool = InlinePool(_nothing_to_do)  # every grading is in the store: no worker has to start
        else:
            pool = ProcessPool(min(workers, max(1, len(requests))))
        return stack.enter_context(Executor(pool, store=store, capacity=sys.maxsize)).grade_many(requests, progress)


def _nothing_to_do(task: str, source: bytes, **options: Any) -> Outcome:
    raise RuntimeError(f"the grading of a kernel of {task} should have been in the store")


def _reason(outcome: Outcome) -> str | None:
    """Return why a graded source is not shown; ``None`` where it may be."""
    if outcome.fault is Fault.INFRA:
        return "infra_fault (run again)"
    if not outcome.correct:
        return str(outcome.verdict)
    return None if all(b.ok for b in outcome.compile) else "compile_error (ahead of time)"


@functools.cache
def eval_entries() -> frozenset[str]:
    """Return the names of the entry functions of the benchmark's eval split, whatever packs are selected."""
    return frozenset(t.entry for t in load_tasks(split="eval", tasks_from=BUILTIN))


def _leak(source: str) -> str | None:
    """Return why a correct source may not be shown: a helper named as an evaluated function would demonstrate that function."""
    defined = {n.name for n in ast.walk(ast.parse(source)) if isinstance(n, ast.FunctionDef)}
    return "defines a function of the eval split" if defined & eval_entries() else None


def counts_text(counter: Counter[str]) -> str:
    """Return counts as text, the largest first; empty where there are none."""
    return ", ".join(f"{k} {n}" for k, n in counter.most_common())


@dataclass
class Common:
    """Settings of every script that makes demonstrations."""

    out: str = MISSING
    """Folder for demonstrations.*, the files beside them, gradings.sqlite and settings.yaml."""
    tasks: str = "*"
    """Glob over ids of the train split, comma-separated."""
    category: str | None = None
    """One category only."""
    backend: str = "cpu"
    """The instruction that prompts show: cpu, or cuda where the model will be timed on a GPU."""
    workers: int = 1
    """Gradings at a time."""
    seed: int = 0
    """Seed of everything that is drawn."""
    format: str = "parquet"
    """parquet, jsonl or arrow."""


@dataclass
class Settings(Common):
    """Settings of this script."""

    variations: int = 4
    """Variations of each kernel, in addition to the kernel itself, before grading."""
    repairs: int = 0
    """Wrong versions of each kernel, before grading. Their rows show a wrong answer and its feedback first, for answers in
    several turns."""
    repeats: int = 1
    """Rows of prompts.* for each task, each with a seed of its own."""


def chosen(s: Common) -> list[Task]:
    """Return the tasks that a script is asked for.

    Args:
        s: the settings.

    Returns:
        The tasks.

    Raises:
        UnknownName: no such format, backend, category or task.
    """
    for kind, name, known in (("format", s.format, FORMATS), ("backend of prompts", s.backend, ("cpu", "cuda"))):
        if name not in known:
            raise UnknownName(kind, name, known)
    return load_tasks(category=s.category, split="train", pattern=s.tasks)


def folder(s: Common) -> Path:
    """Make the folder to write to, save the settings in it, and return it.

    Args:
        s: the settings.

    Returns:
        The folder.

    Raises:
        UsageError: it cannot be made.
    """
    try:
        Path(s.out).mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise UsageError(f"cannot write to out={s.out}: {e.strerror}") from e
    save(s, s.out)
    return Path(s.out)


def run(s: Settings) -> None:
    """Write both datasets and print a summary."""
    write_datasets(s, lambda tasks, store: demonstrations(
        tasks, backend=s.backend, variations=s.variations, seed=s.seed, workers=s.workers, store=store, repairs=s.repairs
    ))  # fmt: skip


def write_datasets(s: Settings, make: Callable[[list[Task], Store], Demonstrations]) -> None:
    """Write prompts and demonstrations and print a summary.

    Args:
        s: the settings.
        make: makes the demonstrations of some tasks, with a store of gradings.
    """
    tasks = chosen(s)
    questions = prompts(tasks, s.backend, repeats=s.repeats, seed=s.seed)
    out = folder(s)
    with contextlib.closing(Store(out / "gradings.sqlite")) as store:
        made = make(tasks, store)
    for name, data in (("prompts", questions), ("demonstrations", made.dataset)):
        print(f"{write(data, out / name, s.format)}: {len(data)} rows")
    kinds = Counter(str(v).split("-")[0] for v in made.dataset["variation"])
    print(f"demonstrations of {len(set(made.dataset['task']))} tasks: {counts_text(kinds)}")
    print(f"refused: {counts_text(made.refused) or 'none'}")
    if made.without:
        print(f"without a kernel of the project's: {', '.join(made.without)}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; exit status 0 when written, 2 on bad usage, 130 when interrupted (the same command continues)."""
    return command("data.py", Settings, __doc__, run, argv)


if __name__ == "__main__":
    sys.exit(main())
