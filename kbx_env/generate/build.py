"""Builds a pack: draws candidates, leaves out duplicates, proves the rest, and writes the files.

Candidate ``k`` of a seed is always the same. Drawing and the search for duplicates run in order in this process; the
proofs run in worker processes. The pack consists of the first ``count`` candidates, in their order, that are proven, so
the number of workers and interruptions do not change it.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import hashlib
import json
import multiprocessing
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from kbx_env import __version__
from kbx_env.errors import UnknownName, UsageError
from kbx_env.generate.drafts import Draft
from kbx_env.generate.families import families
from kbx_env.spec import packs

GRADINGS = 3
"""Fresh gradings of the kernel of every task."""
ATTEMPTS = 12
"""Candidates for each task that is asked for; more means that the families cannot give as many different tasks."""
AHEAD = 8
"""Candidates given to each worker process ahead of the oldest proof that is waited for: with two, a proof that takes ten times as
long as the others left the other processes idle."""
RENEWED = 500
"""Proofs of each worker process before it is replaced: its memory grows by a third of a MiB with every task."""
PROOFS = "proofs.jsonl"
"""File with the result of every proof, for resuming: index, task, family, faults, seconds."""
KERNELS = "kernels.jsonl"
"""File with the kernels, as the policy ``replay`` reads them."""
VERSION = 4
"""Version of the generator: another one gives other tasks for the same seed."""
Progress = Callable[[int, int, int], None]
"""Is told the numbers of proven tasks, of tasks asked for, and of candidates dropped."""


@dataclass(frozen=True)
class Settings:
    """What to generate.

    Attributes:
        count: tasks of the pack.
        seed: of all choices.
        difficulties: levels, of which each candidate has one.
        families: names of families, of which each candidate has one.
        name: of the pack.

    Raises:
        UsageError: a number is out of range, or there is no such family.
    """

    count: int
    seed: int
    difficulties: tuple[int, ...] = (1, 2, 3, 4, 5)
    families: tuple[str, ...] = ()
    name: str = "generated"

    def __post_init__(self) -> None:
        if self.count < 1:
            raise UsageError(f"--count is {self.count}; at least 1")
        for level in self.difficulties:
            if level not in range(1, 6):
                raise UsageError(f"difficulty {level}; from 1 to 5")
        for name in self.families:
            if name not in families():
                raise UnknownName("family", name, families())

    @property
    def chosen(self) -> tuple[str, ...]:
        """The families; all of them where none is named."""
        return self.families or tuple(families())

    def candidate(self, index: int) -> Draft:
        """Return candidate number ``index``."""
        rng = random.Random(f"kbx_env.generate {VERSION} {self.seed} {index}")
        family = self.chosen[index % len(self.chosen)]
        level = rng.choice(self.difficulties)
        for _ in range(200):
            draft = families()[family](rng, level)
            if draft.difficulty in self.difficulties:
                return draft
        raise UsageError(f"family {family!r} has no task of difficulty {', '.join(map(str, self.difficulties))}")


@dataclass
class Result:
    """A finished pack.

    Attributes:
        card: of the pack.
        seconds: of this run.
    """

    card: dict[str, Any]
    seconds: float


@dataclass
class _Candidate:
    index: int
    draft: Draft
    entry: str
    task: str
    local: str
    faults: list[str] | None = None
    twin: str | None = None


def _good(candidate: _Candidate) -> bool:
    """Return whether a candidate is proven and like no other task."""
    return candidate.twin is None and candidate.faults == []


class _Provers:
    """Worker processes that prove tasks, replaced after ``RENEWED`` proofs each.

    Not ``max_tasks_per_child``: with it, an executor of Python 3.11 may wait forever (CPython issue 115634).
    """

    def __init__(self, workers: int) -> None:
        self._workers, self._given = workers, 0
        self._pool: concurrent.futures.ProcessPoolExecutor | None = None

    def submit(self, *args: Any) -> concurrent.futures.Future[tuple[list[str], str, float]]:
        """Queue a proof; arguments as for ``prove``."""
        if self._pool is not None and self._given % (RENEWED * self._workers) == 0:
            self._pool.shutdown(wait=False)  # it still does what it was given
            self._pool = None
        if self._pool is None:
            context = multiprocessing.get_context("spawn")
            self._pool = concurrent.futures.ProcessPoolExecutor(self._workers, mp_context=context, initializer=_start)
        self._given += 1
        return self._pool.submit(prove, *args)

    def close(self) -> None:
        """End the processes; proofs that have not begun are cancelled."""
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)


@dataclass
class _Builder:
    """Writes one pack; fields as for ``build``."""

    settings: Settings
    out: Path
    workers: int
    tell: Progress
    proofs: dict[int, dict[str, Any]] = field(default_factory=dict)
    waiting: collections.deque[_Candidate] = field(default_factory=collections.deque)
    seen: list[_Candidate] = field(default_factory=list)

    def run(self) -> dict[str, Any]:
        """Build the pack.

        Returns:
            Its card.

        Raises:
            UsageError: the families do not give as many different tasks.
        """
        self._open()
        count = self.settings.count
        proven: list[_Candidate] = []
        source = self._candidates()
        with contextlib.closing(_Provers(self.workers)) as provers:
            running: dict[int, concurrent.futures.Future[tuple[list[str], str, float]]] = {}
            order: collections.deque[_Candidate] = collections.deque()
            while len(proven) < count:
                # Those that are known to be good may be enough: another run of a finished pack proves nothing.
                while (
                    len(running) < AHEAD * self.workers
                    and len(proven) + sum(map(_good, order)) < count
                    and len(proven) + len(order) < count + 2 * self.workers  # few proofs are begun that the pack does not need
                ):
                    candidate = next(source)
                    order.append(candidate)
                    if candidate.index in self.proofs:
                        candidate.faults = list(self.proofs[candidate.index]["faults"])
                    elif candidate.twin is None:
                        running[candidate.index] = provers.submit(
                            str(self.out), candidate.task, self.settings.seed * 1000003 + candidate.index
                        )
                candidate = order.popleft()
                if candidate.index in running:
                    candidate.faults, telling, seconds = running.pop(candidate.index).result()
                    self._note(candidate, telling, seconds)
                self.seen.append(candidate)
                if _good(candidate):
                    proven.append(candidate)
                else:
                    self._remove(candidate)
                self.tell(len(proven), count, len(self.seen) - len(proven))
            for future in running.values():
                future.cancel()
        for extra in order:
            self._remove(extra)
        return self._finish(proven)

    def _open(self) -> None:
        """Make the folder, or go on with an earlier run of the same settings."""
        card = self.out / packs.CARD
        about = json.loads(json.dumps({"settings": asdict(self.settings), "generator": VERSION}))
        if card.exists():
            before = json.loads(card.read_text())
            if {k: before.get(k) for k in about} != about:
                raise UsageError(
                    f"{self.out} holds a pack of other settings; choose another --out, or delete the folder"
                )
        elif self.out.exists() and any(self.out.iterdir()):
            raise UsageError(f"{self.out} is not empty and holds no generated pack; choose another --out")
        self.out.mkdir(parents=True, exist_ok=True)
        for category in ("activation", "fusion"):
            (self.out / category).mkdir(exist_ok=True)
        card.write_text(json.dumps({"name": self.settings.name, **about}, indent=1) + "\n")
        if (file := self.out / PROOFS).exists():
            rows = [json.loads(line) for line in file.read_text().splitlines() if line.endswith("}")]
            self.proofs = {row["index"]: row for row in rows}

    def _candidates(self) -> Iterator[_Candidate]:
        """Yield the candidates in order, with their files written; of duplicates ``twin`` is set."""
        from kbx_env.generate.duplicates import Known
        from kbx_env.spec import catalog

        known, taken = Known(), set[str]()
        pack = packs.find(str(self.out))
        for index in range(ATTEMPTS * self.settings.count + 50):
            draft = self.settings.candidate(index)
            entry = draft.entry(taken)
            local = f"{draft.category}/{entry}"
            candidate = _Candidate(index, draft, entry, pack.id_of(local), local)
            self._write(candidate)
            taken.add(entry)
            candidate.twin = known.twin(catalog.load_task(candidate.task))
            yield candidate
        raise UsageError(
            f"only {sum(c.faults == [] for c in self.seen)} different tasks among {index + 1} candidates; ask for fewer "
            f"(--count), or allow more families and difficulties"
        )

    def _write(self, candidate: _Candidate) -> None:
        for folder, text in (
            (self.out, candidate.draft.task_file(candidate.entry)),
            (self.out / "experts", candidate.draft.expert_file(candidate.entry)),
        ):
            path = folder / f"{candidate.local}.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    def _remove(self, candidate: _Candidate) -> None:
        for folder in (self.out, self.out / "experts"):
            (folder / f"{candidate.local}.py").unlink(missing_ok=True)

    def _note(self, candidate: _Candidate, telling: str, seconds: float) -> None:
        """Keep the result of a proof, so that another run need not repeat it."""
        row = {
            "index": candidate.index,
            "task": candidate.task,
            "family": candidate.draft.family,
            "faults": candidate.faults,
            "telling": telling,
            "seconds": round(seconds, 2),
        }
        self.proofs[candidate.index] = row
        with (self.out / PROOFS).open("a") as f:
            f.write(json.dumps(row) + "\n")

    def _finish(self, proven: Sequence[_Candidate]) -> dict[str, Any]:
        """Write the kernels, which cases are telling, and the card."""
        from kbx_env.spec.catalog import expert_source, load_task

        rows = {
            c.local: {"fingerprint": load_task(c.task).fingerprint, "telling": self.proofs[c.index]["telling"]}
            for c in proven
        }
        (self.out / "telling.json").write_text(json.dumps(rows, indent=0) + "\n")

        with (self.out / KERNELS).open("w") as f:
            for c in proven:
                row = {
                    "task": c.task,
                    "predict": expert_source(c.task),
                    "family": c.draft.family,
                    "difficulty": c.draft.difficulty,
                }
                f.write(json.dumps(row) + "\n")
        # Empty folders of categories whose candidates were all dropped.
        for folder in sorted((p for p in self.out.rglob("*") if p.is_dir()), reverse=True):
            if not any(p for p in folder.iterdir() if p.name != "__pycache__"):
                for cached in folder.rglob("*.pyc"):
                    cached.unlink()
                with contextlib.suppress(OSError):
                    (folder / "__pycache__").rmdir()
                    folder.rmdir()
        card = self._card(proven)
        (self.out / packs.CARD).write_text(json.dumps(card, indent=1) + "\n")
        return card

    def _card(self, proven: Sequence[_Candidate]) -> dict[str, Any]:
        dropped: dict[str, int] = collections.Counter()
        for c in self.seen:
            if c.twin is not None:
                dropped[
                    "equal to a task of the benchmark" if packs.split_id(c.twin)[0] is None else "equal to another task"
                ] += 1
            elif c.faults:
                dropped[c.faults[0].partition(":")[0]] += 1

        def counts(values: Sequence[Any]) -> dict[str, int]:
            return {str(k): n for k, n in sorted(collections.Counter(values).items())}

        from kbx_env import versions

        digest = hashlib.sha256()
        for c in proven:
            digest.update(
                (self.out / f"{c.local}.py").read_bytes() + (self.out / "experts" / f"{c.local}.py").read_bytes()
            )
        found = asdict(self.settings)
        return {
            "name": self.settings.name,
            "settings": json.loads(json.dumps(found)),
            "generator": VERSION,
            "tasks": len(proven),
            "families": counts([c.draft.family for c in proven]),
            "categories": counts([c.draft.category for c in proven]),
            "difficulties": counts([c.draft.difficulty for c in proven]),
            "candidates": len(self.seen),
            "dropped": dict(sorted(dropped.items())),
            "gradings_of_each_kernel": GRADINGS,
            "kbx_env": __version__,
            "versions": versions.environment("cpu"),
            "content": digest.hexdigest(),
        }


def build(settings: Settings, out: Path, workers: int, tell: Progress) -> Result:
    """Build a pack, or go on with one that was interrupted.

    Args:
        settings: what to generate.
        out: folder of the pack.
        workers: processes that prove tasks.
        tell: is told the progress.

    Returns:
        The card of the pack, and the seconds of this run.

    Raises:
        UsageError: the folder holds something else, or the families do not give as many different tasks.
    """
    if workers < 1:
        raise UsageError(f"--workers is {workers}; at least 1")
    began, threads = time.monotonic(), torch.get_num_threads()
    torch.set_num_threads(
        1
    )  # tensors of a few elements: more threads only wait for each other, on cores that the proofs need
    try:
        card = _Builder(settings, out, workers, tell).run()
    finally:
        torch.set_num_threads(threads)
    return Result(card, time.monotonic() - began)


_grader: Any = None
"""The warm grader of a worker process."""


def _start() -> None:
    """Start the grader of a worker process."""
    global _grader
    import atexit
    import signal

    from kbx_env.generate.shared_compiler import SharedCompiler
    from kbx_env.grading.grader import Grader

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends the pool
    torch.set_num_threads(1)
    _grader = Grader()
    _grader.processes.compilers = SharedCompiler()
    atexit.register(_grader.close)


def prove(place: str, task_id: str, seed: int) -> tuple[list[str], str, float]:
    """Prove a task in a worker process.

    Args:
        place: folder of the pack.
        task_id: of the task.
        seed: of the hidden inputs of its gradings, so that a pack is the same whenever it is generated.

    Returns:
        The faults of the task, none if it is proven; a 1 or a 0 for each case, whether it is telling (``grading.telling``); and
        the seconds that this took.
    """
    from kbx_env.eval import task_checks
    from kbx_env.executor.direct import retrying
    from kbx_env.grading.telling import is_telling
    from kbx_env.spec.catalog import load_task

    began = time.monotonic()
    packs.find(place)
    numbers = iter(range(seed, seed + GRADINGS))

    def grade(task: str, source: str, **options: Any) -> Any:
        return retrying(_grader.grade)(task, source, seed=next(numbers), **options)

    task = load_task(task_id)
    try:
        found = task_checks.faults(task, grade, GRADINGS)
    except Exception as e:  # one candidate must not end a run of thousands; the card counts it
        found = [f"error: {type(e).__name__}: {e}"]
    telling = "" if found else "".join(str(int(is_telling(task, k))) for k in range(len(task.cases)))
    return found, telling, time.monotonic() - began


def summary(card: Mapping[str, Any]) -> str:
    """Return the card as a few lines of text."""
    lines = [f"{card['tasks']} tasks of {card['candidates']} candidates"]
    for key in ("families", "difficulties", "dropped"):
        lines.append(f"{key}: " + (", ".join(f"{k} {n}" for k, n in card[key].items()) or "none"))
    return "\n".join(lines)
