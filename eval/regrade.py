"""Grades the same answers under the other grading: the paper's tolerances beside the task's contract, or the reverse."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import as_completed
from typing import Any

from kbx_env.eval.runner import Answer, Asker

from kbx_env.executor import Request
from kbx_env.outcome import Fault, Outcome
from kbx_env.spec.task import Task

OTHER = {"contract": "paper", "paper": "contract"}


def grade_beside(
    askers: Sequence[Asker], tasks: Sequence[Task], found: Mapping[str, Mapping[tuple[str, int], Answer]],
    progress: Callable[[], None] = lambda: None,
) -> dict[str, dict[tuple[str, int], Outcome]]:  # fmt: skip
    """Grade every judged answer that has a source under the other grading, untimed.

    Args:
        askers: the policies.
        tasks: the tasks.
        found: answers by policy, and by task and sample.
        progress: called after each grading.

    Returns:
        Gradings by policy, and by task and sample.
    """
    by_id = {t.id: t for t in tasks}
    jobs = {}
    for asker in askers:
        answers = found[asker.spec]
        wanted = {k: a.outcome.source_sha256 for k, a in answers.items() if a.outcome.source_sha256 and not _masked(a.outcome)}
        options = {**asker.options, "grading": OTHER[asker.options["grading"]], "timing": False}
        options.pop("compiled", None)  # it needs times
        for row in asker.store.records(policy=asker.spec, sources=True):
            key = (row.task, row.sample)
            if row.source is None or row.sha != wanted.get(key):
                continue
            del wanted[key]  # an earlier run may have left a second row of the same source
            record = {**asker.about, "fingerprint": by_id[row.task].fingerprint}
            name = f"{asker.spec} ({options['grading']})"
            job = asker.executor.submit(Request(row.task, row.source, options, record, name, row.sample))
            jobs[job] = (asker.spec, key)
    made: dict[str, dict[tuple[str, int], Outcome]] = {a.spec: {} for a in askers}
    for job in as_completed(jobs):
        spec, key = jobs[job]
        made[spec][key] = job.result()
        progress()
    return made


def differences(
    answers: Mapping[tuple[str, int], Answer], other: Mapping[tuple[str, int], Outcome]
) -> list[dict[str, Any]]:
    """Return the answers that are correct under one grading only.

    Args:
        answers: by task and sample.
        other: their gradings under the other grading.

    Returns:
        Rows sorted by task; masked answers are left out.
    """
    rows = []
    for (task, sample), second in sorted(other.items()):
        first = answers[task, sample].outcome
        if _masked(second) or first.correct == second.correct:
            continue
        failed = second if first.correct else first
        rows.append({
            "task": task, "sample": sample, first.grading: str(first.verdict), second.grading: str(second.verdict),
            "message": failed.message,
        })  # fmt: skip
    return rows


def _masked(o: Outcome) -> bool:
    return o.fault is Fault.INFRA
