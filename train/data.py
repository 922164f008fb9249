"""Training data: prompts of tasks, and demonstrations that the grader has found correct.

    python train/data.py out=runs/data tasks='*' variations=4 workers=2 seed=0 format=parquet

Demonstrations are the project's own kernels of the train split, and variations of them. Every one is graded before it is
taken; gradings are kept in ``gradings.sqlite``, so that a killed run goes on with the same command. No task of the eval split
gets in. With ``repairs`` there are conversations too: a wrong answer, what the grader says of it, the right one.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if __package__ in (None, ""):  # run as a script from a clone
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from kbx_env.baselines.llm.conversation import follow_up
from kbx_env.train.breaking import broken
from kbx_env.train.compact import compact
from kbx_env.train.copying import copies as copied
from kbx_env.train.copying import retold
from kbx_env.train.rows import FORMATS, about, by_difficulty, load, message, only, prompts, write
from kbx_env.train.settings import MISSING, command, save
from kbx_env.train.vary import variations as varied

from kbx_env import versions
from kbx_env.envs.prompt import feedback
from kbx_env.errors import UnknownName, UsageError
from kbx_env.executor import Executor, InlinePool, ProcessPool, Request, WorkerPool
from kbx_env.outcome import Fault, Outcome, Verdict
from kbx_env.spec.catalog import expert_source, load_tasks, splits
from kbx_env.spec.task import Task
from kbx_env.store import Store

if TYPE_CHECKING:
    from datasets import Dataset

__all__ = ["Demonstrations", "by_difficulty", "demonstrations", "load", "only", "prompts", "write"]
EXPERT = "expert"
"""The variation that is none."""
COPY = "copy"
"""The variation of a row that shows another one's kernel under other names (``train/copying.py``)."""
REPAIR = "repair"
"""The variation of a row in which a wrong answer and its verdict come first."""
MENDED = (Verdict.MALFORMED, Verdict.COMPILE_ERROR, Verdict.RUNTIME_ERROR, Verdict.INCORRECT)
"""Verdicts of wrong answers that are shown: honest mistakes."""
STYLES = ("plain", "compact")
GRADING = {
    "backend": "cpu", "targets": ["sm_90"], "grading": "contract", "seed": None, "timing": False, "split": "train",
    "torch_ops": "strict", "estimate": None,
}  # fmt: skip
"""How demonstrations are graded. ``split``: the held-out shapes are for evaluation; they choose no training data either."""


@dataclass(frozen=True)
class Demonstrations:
    """``dataset`` holds the rows; ``refused`` counts variations that were not taken, by verdict; ``without`` are tasks for
    which the project has no kernel."""

    dataset: Dataset
    refused: Counter[str]
    without: tuple[str, ...]


def demonstrations(
    tasks: Sequence[Task], *, backend: str = "cpu", variations: int = 4, seed: int = 0, workers: int = 1,
    store: Store | None = None, progress: bool = True, grade: Callable[..., Outcome] | None = None, style: str = "plain",
    copies: int = 0, repairs: int = 0,
) -> Demonstrations:  # fmt: skip
    """Rows for supervised fine-tuning: ``prompt``, ``completion``, ``task``, ``category``, ``difficulty``, ``variation``.

    Args:
        tasks: of the train split.
        backend: whose instruction the prompts show, ``cpu`` or ``cuda``; grading itself is done on the CPU backend.
        variations: of each kernel, beside itself, before grading.
        seed: of the variations.
        workers: gradings at a time.
        store: keeps the gradings; with the same one nothing is graded twice.
        progress: show a bar on stderr, if that is a terminal.
        grade: stands in for the real grader in tests.
        style: ``plain``, or ``compact``: without comments, unused functions and the kernels' own formatting.
        copies: of each row that was taken, with other names for the entry function and its parameters in prompt and answer.
        repairs: wrong versions of each kernel that was taken, before grading. Each that is wrong is in a row whose prompt has
            three messages: the instruction, the wrong answer, its verdict. Each copy has such a row too, wrong versions by turns.

    Raises:
        UsageError: a task of the eval split, or numbers that make no sense.
        UnknownName: no such backend or style.
    """
    if evil := [t.id for t in tasks if splits().get(t.id) != "train"]:
        raise UsageError(f"no demonstrations of tasks outside the train split: {', '.join(evil[:5])}; use split='train'")
    if backend not in ("cpu", "cuda"):
        raise UnknownName("backend of prompts", backend, ("cpu", "cuda"))
    if style not in STYLES:
        raise UnknownName("style", style, STYLES)
    if min(variations, copies, repairs) < 0 or workers < 1:
        raise UsageError(
            f"variations is {variations}, copies is {copies}, repairs is {repairs}, workers is {workers}; at least 0, 0, 0 and 1"
        )
    brief = compact if style == "compact" else _as_is
    sources = [(t, s) for t in tasks if (s := expert_source(t.id)) is not None]
    asked = [
        (t, name, brief(text, t.entry)) for t, source in sources
        for name, text in [(EXPERT, source), *varied(source, t.entry, variations, f"{seed} {t.id}")]
    ]  # fmt: skip
    outcomes = graded(asked, workers, store, progress, grade)
    rows, refused, taken = list[dict[str, Any]](), Counter[str](), list[tuple[Task, str, str]]()
    for source, outcome in zip(asked, outcomes, strict=True):
        if why := _why_not(outcome) or _leak(source[2]):
            refused[why] += 1
        else:
            taken.append(source)
    faults = _faults(taken, repairs, seed, lambda wrong: graded(wrong, workers, store, progress, grade))
    for task, name, text in taken:
        others = copied(task, text, copies, f"{seed} {name} {task.id}", entries())
        mine = list(faults.get((task.id, name), {}).items())
        for number, (told, shown) in enumerate([(task, text), *others]):
            before, right = f"{COPY}-{number - 1}-" if number else "", [answer(shown)]
            rows.append({"prompt": [message(told, backend)], "completion": right, "variation": before + name, **about(task)})
            some = [mine[number % len(mine)]] if number and mine else mine
            wrong = broken(shown, repairs, f"{seed} {name} {task.id}") if some else []
            for k, (given, said) in some:
                if (verdict := retold(said, given, task, wrong[k][1], told) if number else said) is None:
                    continue
                asks = [message(told, backend), answer(wrong[k][1]), {"role": "user", "content": follow_up(verdict)}]
                rows.append({"prompt": asks, "completion": right, "variation": f"{before}{REPAIR}-{k}-{name}", **about(task)})
    if not rows:
        raise UsageError(f"none of {len(asked)} sources may be shown: {_counts(refused) or 'no task has a kernel'}")
    from datasets import Dataset

    had = {t.id for t, _ in sources}
    return Demonstrations(Dataset.from_list(rows), refused, tuple(t.id for t in tasks if t.id not in had))


def answer(text: str) -> dict[str, str]:
    """The message in which a model answers with a module."""
    return {"role": "assistant", "content": f"```python\n{text.strip(chr(10))}\n```"}


def _faults(
    taken: Sequence[tuple[Task, str, str]], repairs: int, seed: int,
    verdicts: Callable[[list[tuple[Task, str, str]]], list[Outcome]],
) -> dict[tuple[str, str], dict[int, tuple[str, str]]]:  # fmt: skip
    """By task and variation its wrong versions, numbered as by ``broken``, and what the grader says of each."""
    asked, whose = [], []
    for task, name, text in taken:
        for k, (_, wrong) in enumerate(broken(text, repairs, f"{seed} {name} {task.id}")):
            asked.append((task, name, wrong))
            whose.append((task.id, name, k))
    found: dict[tuple[str, str], dict[int, tuple[str, str]]] = {}
    for (task_id, name, k), (_, _, wrong), outcome in zip(whose, asked, verdicts(asked) if asked else [], strict=True):
        if outcome.verdict in MENDED:
            found.setdefault((task_id, name), {})[k] = wrong, feedback(outcome)
    return found


def graded(
    asked: Sequence[tuple[Task, str, str]], workers: int, store: Store | None, progress: bool, grade: Callable[..., Outcome] | None
) -> list[Outcome]:
    """The outcome of each source, given as task, what it is called, and text."""
    here = versions.environment("cpu")
    requests = [
        Request(t.id, text.encode(), GRADING, here | {"fingerprint": t.fingerprint}, "demonstrations")
        for t, _, text in asked
    ]
    with contextlib.ExitStack() as stack:
        lane: WorkerPool
        if grade is not None:
            lane = InlinePool(grade)
        elif store is not None and all(store.get(r.key) for r in requests):
            lane = InlinePool(_nothing_to_do)  # all is known: no worker need start
        else:
            lane = ProcessPool(min(workers, max(1, len(requests))))
        return stack.enter_context(Executor(lane, store=store, capacity=sys.maxsize)).grade_many(requests, progress)


def _as_is(source: str, entry: str) -> str:
    return source


def _nothing_to_do(task: str, source: bytes, **options: Any) -> Outcome:
    raise RuntimeError(f"{task} was to be in the store")


def _why_not(outcome: Outcome) -> str | None:
    if outcome.fault is Fault.INFRA:
        return "infra_fault (run again)"
    if not outcome.correct:
        return str(outcome.verdict)
    return None if all(b.ok for b in outcome.compile) else "compile_error (ahead of time)"


@functools.cache
def eval_entries() -> frozenset[str]:
    """Names of the entry functions of the eval split."""
    return frozenset(t.entry for t in load_tasks(split="eval"))


@functools.cache
def entries() -> frozenset[str]:
    """Names of the entry functions of all tasks: a made-up name that is one of them would not be made up."""
    return frozenset(t.entry for t in load_tasks(split="all"))


def _leak(text: str) -> str | None:
    """A helper with the name of an evaluated function would be a demonstration of it."""
    defined = {n.name for n in ast.walk(ast.parse(text)) if isinstance(n, ast.FunctionDef)}
    return "defines a function of the eval split" if defined & eval_entries() else None


def _counts(counter: Counter[str]) -> str:
    return ", ".join(f"{k} {n}" for k, n in counter.most_common())


@dataclass
class Common:
    """Of every script that makes demonstrations."""

    out: str = MISSING
    """Folder for demonstrations.*, what is told beside them, gradings.sqlite and settings.yaml."""
    tasks: str = "*"
    """Glob over ids of the train split, comma-separated."""
    category: str | None = None
    """One category only."""
    backend: str = "cpu"
    """Whose instruction is shown: cpu, or cuda where the model will be timed on a GPU."""
    workers: int = 1
    """Gradings at a time."""
    seed: int = 0
    """Of all that is drawn."""
    format: str = "parquet"
    """parquet, jsonl or arrow."""


@dataclass
class Settings(Common):
    """Of this script."""

    variations: int = 4
    """Of each kernel, beside itself, before grading."""
    style: str = "plain"
    """compact: no comments, no unused functions, one way to break lines; for small models, with build_model.py tokens=lines."""
    copies: int = 0
    """Of each demonstration, under made-up names in prompt and answer: teaches a model from nothing to read the name."""
    repairs: int = 0
    """Wrong versions of each kernel, before grading: rows in which one and its verdict come first, for answers in several turns."""
    repeats: int = 1
    """Rows of prompts.* for each task, with seeds of their own."""


def chosen(s: Common) -> list[Task]:
    """The tasks that a script is asked for.

    Raises:
        UnknownName: no such format, backend, category or task.
    """
    for kind, name, known in (("format", s.format, FORMATS), ("backend of prompts", s.backend, ("cpu", "cuda"))):
        if name not in known:
            raise UnknownName(kind, name, known)
    return load_tasks(category=s.category, split="train", pattern=s.tasks)


def folder(s: Common) -> Path:
    """The folder to write to, with the settings in it.

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
    """Write both datasets and say what is in them."""
    tasks = chosen(s)
    asked = prompts(tasks, s.backend, repeats=s.repeats, seed=s.seed)
    out = folder(s)
    with contextlib.closing(Store(out / "gradings.sqlite")) as store:
        made = demonstrations(
            tasks, backend=s.backend, variations=s.variations, seed=s.seed, workers=s.workers, store=store, style=s.style,
            copies=s.copies, repairs=s.repairs,
        )  # fmt: skip
    for name, data in (("prompts", asked), ("demonstrations", made.dataset)):
        print(f"{write(data, out / name, s.format)}: {len(data)} rows")
    kinds = Counter(str(v).split("-")[0] for v in made.dataset["variation"])
    print(f"demonstrations of {len(set(made.dataset['task']))} tasks: {_counts(kinds)}")
    print(f"refused: {_counts(made.refused) or 'none'}")
    if made.without:
        print(f"without a kernel of the project's: {', '.join(made.without)}")


def main(argv: Sequence[str] | None = None) -> int:
    """Exit 0 when written, 2 on bad usage, 130 when interrupted: go on with the same command."""
    return command("data.py", Settings, __doc__, run, argv)


if __name__ == "__main__":
    sys.exit(main())
