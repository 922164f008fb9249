"""Grades a random sample of a report again, from the sources that it stored, and says whether the report holds.

    kbx check-report runs/expert --sample 20

Exit status: 0 the report holds, 1 it does not, 2 bad usage, such as a folder without stored sources.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import random
import secrets
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kbx_env.eval import report_data
from kbx_env.eval.leaderboard import inconsistencies
from kbx_env.eval.pages import formatting
from kbx_env.eval.report_data import PolicyStudy, Row

from kbx_env import versions
from kbx_env.errors import UsageError
from kbx_env.executor import Executor, InlinePool, ProcessPool, Request
from kbx_env.options import GradeOptions
from kbx_env.outcome import Fault, Outcome
from kbx_env.spec import packs
from kbx_env.spec.catalog import load_task
from kbx_env.store import Store

SAMPLE = 20
"""Answers that are graded again by default."""
_OPTIONS = ("backend", "targets", "grading", "seed", "timing", "split", "torch_ops", "estimate", "sizes", "precision", "compiled")
"""Entries of a manifest that are options of ``grade``."""


@dataclass(frozen=True)
class Regraded:
    """One answer of the sample.

    Attributes:
        policy: its policy.
        row: the answer in the report.
        outcome: the new grading; ``None`` where the report stored no source for the answer.
        same_device: whether speedups can be compared.
    """

    policy: str
    row: Row
    outcome: Outcome | None
    same_device: bool

    @property
    def masked(self) -> bool:
        """Whether the new grading gave no verdict, so that it says nothing about the report."""
        return self.outcome is not None and self.outcome.fault is Fault.INFRA

    @property
    def problem(self) -> str | None:
        """What contradicts the report; ``None`` if nothing does."""
        if self.outcome is None:
            return "its source is not in gradings.sqlite"
        if self.masked:
            return None
        if str(self.outcome.verdict) != self.row.verdict:
            return f"verdict {self.row.verdict}, graded again: {self.outcome.verdict}"
        timing, low, high = self.outcome.timing, self.row.low, self.row.high
        if self.same_device and timing is not None and not timing.void and low is not None and high is not None:
            if timing.high < low or timing.low > high:
                said, found = (formatting.between(*ends, formatting.times) for ends in ((low, high), (timing.low, timing.high)))
                return f"speedup {said}, timed again: {found}"
        return None


@dataclass(frozen=True)
class Check:
    """The result of a check.

    Attributes:
        differences: task set, versions and devices that differ between the report and this machine, one line each.
        sums: contradictions within the report, such as sums that its rows do not have.
        graded: the sample.
        of: number of answers from which the sample was drawn.
        seed: of the draw.
    """

    differences: tuple[str, ...]
    sums: tuple[str, ...]
    graded: tuple[Regraded, ...]
    of: int
    seed: int

    @property
    def holds(self) -> bool:
        """Whether nothing contradicts the report, and at least one answer got a verdict."""
        judged = [g for g in self.graded if not g.masked]
        return bool(judged) and not self.sums and all(g.problem is None for g in judged)


def differences(manifest: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """Compare the environment of a report with that of this machine.

    Args:
        manifest: of the report.
        here: the same entries, of this machine.

    Returns:
        A line for each entry that differs, the task set first. A report from before an entry was recorded has none.
    """
    found = []
    for name, value in here.items():
        said = manifest.get(name)
        if said is not None and said != value:
            short = (str(v)[:12] if name in ("task_set_hash", "grader") else str(v) for v in (said, value))
            found.append(f"{name.replace('_', ' ')}: {next(short)} in the report, {next(short)} here")
    return found


def check(
    folder: str | Path, sample: int = SAMPLE, seed: int | None = None, workers: int = 1, grade: Callable[..., Outcome] | None = None
) -> Check:
    """Grade a random sample of a report again.

    Args:
        folder: of the report.
        sample: the most answers to grade.
        seed: of the draw; ``None`` for a new one. Inputs are drawn as in the report: secret and new, or by its fixed seed.
        workers: gradings at a time.
        grade: replaces the real grader in tests.

    Returns:
        The result.

    Raises:
        UsageError: no report, no stored sources, or nothing to grade.
    """
    if sample < 1 or workers < 1:
        raise UsageError(f"--sample is {sample}, --workers is {workers}; both at least 1")
    study = report_data.read(folder)
    file = Path(folder) / "gradings.sqlite"
    if not file.is_file():
        raise UsageError(f"no {file}: the report stored no sources here; copy its gradings.sqlite beside its report.json")
    seed = secrets.randbits(32) if seed is None else seed
    # An answer without a source is a policy's lack of an answer, which only a correct one contradicts.
    every = [(p, r) for p in study.policies for r in p.judged if r.raw.get("source_sha256") or r.correct]
    if not every:
        raise UsageError(f"{folder}: no answer of the report was judged, so nothing can be graded again")
    drawn = random.Random(seed).sample(every, min(sample, len(every)))
    manifest = drawn[0][0].manifest
    options = GradeOptions.of({k: manifest[k] for k in _OPTIONS if k in manifest}).resolved()
    sources = _sources(file, drawn)
    requests = [
        Request(r.task, source, {k: p.manifest[k] for k in _OPTIONS if k in p.manifest})
        for p, r in drawn if (source := sources.get(_key(p, r))) is not None
    ]  # fmt: skip
    for request in requests:
        load_task(request.task)  # an unknown task is bad usage, not a fault of the grader
    pool = InlinePool(grade) if grade else ProcessPool(min(workers, max(1, len(requests))))
    with Executor(pool, deadline=options.deadline) as executor:
        outcomes = iter(executor.grade_many(requests))
    here = {**versions.task_set(r.task for _, r in every).entries(), **versions.environment(options.backend)}
    graded = [
        Regraded(p.name, r, next(outcomes) if _key(p, r) in sources else None, p.manifest.get("device") == here["device"])
        for p, r in drawn
    ]
    return Check(tuple(differences(manifest, here)), inconsistencies(folder), tuple(graded), len(every), seed)


def _key(p: PolicyStudy, r: Row) -> tuple[str, str, int, str]:
    return p.spec, r.task, r.sample, str(r.raw.get("source_sha256"))


def _sources(file: Path, drawn: Sequence[tuple[PolicyStudy, Row]]) -> dict[tuple[str, str, int, str], bytes]:
    """Return the stored sources of answers, each with the hash that the report states."""
    wanted, found = {_key(p, r) for p, r in drawn}, {}
    with contextlib.closing(Store(file)) as store:
        for policy in sorted({p.spec for p, _ in drawn}):
            for row in store.records(policy=policy, sources=True):
                if row.source is not None:
                    key = (row.policy, row.task, row.sample, hashlib.sha256(row.source).hexdigest())
                    if key in wanted:
                        found[key] = row.source
    return found


def lines(found: Check) -> list[str]:
    """Describe a check: what differs first, then each answer, then the result."""
    text = [f"differs: {line}" for line in found.differences]
    text += [f"contradiction: {line}" for line in found.sums]
    for g in found.graded:
        state = "not judged" if g.masked else "holds" if g.problem is None else "DOES NOT HOLD"
        why = g.problem or (g.outcome.message if g.masked and g.outcome else g.row.verdict)
        text.append(f"{state}: {g.policy} on {g.row.task}{f' #{g.row.sample + 1}' if g.row.sample else ''}: {why}")
    judged = [g for g in found.graded if not g.masked]
    held = sum(g.problem is None for g in judged)
    result = "the report holds" if found.holds else "the report does not hold"
    caution = ", but it was made with other versions or tasks" if found.differences else ""
    text.append(f"{result}{caution}: {held} of {len(judged)} graded again as reported, drawn from {found.of} (--seed {found.seed})")
    return text


def main(argv: Sequence[str] | None = None) -> int:
    """Check a report; return 0 if it holds, 1 if it does not, 2 on bad usage."""
    p = argparse.ArgumentParser(description="Grade a sample of a report again.")
    p.add_argument("report", metavar="DIR", help="the folder of the report, with its gradings.sqlite")
    p.add_argument("--sample", type=int, default=SAMPLE, metavar="N", help=f"answers to grade again (default: {SAMPLE})")
    p.add_argument("--seed", type=int, metavar="S", help="of the draw (default: a new one, which the last line names)")
    p.add_argument("--workers", type=int, default=1, help="gradings at a time (default: 1)")
    p.add_argument("--tasks-from", metavar="PACK", help="task packs of the report: folders or names, comma-separated")
    a = p.parse_args(argv)
    try:
        if a.tasks_from is not None:
            packs.select(a.tasks_from)
        found = check(a.report, a.sample, a.seed, a.workers)
    except UsageError as e:
        print(f"check-report: {e}", file=sys.stderr)
        return 2
    print("\n".join(lines(found)))
    return 0 if found.holds else 1


if __name__ == "__main__":
    sys.exit(main())
