"""Grades the same answers under a second grading (``--gradings paper,contract``), and says why the two verdicts differ."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import as_completed
from typing import Any

from kbx_env.eval.runner import Answer, Asker

from kbx_env.errors import UnknownName, UsageError
from kbx_env.executor import Request
from kbx_env.options import GRADINGS
from kbx_env.outcome import Fault, Outcome, Verdict
from kbx_env.spec.catalog import load_task
from kbx_env.spec.criteria import Dropout, Invariant, Sample, Windows
from kbx_env.spec.task import Case, Task

_BY_TORCH = frozenset({"torch_compute", "host_traffic", "provenance", "no_launch", "ablation", "constant"})
"""Rules of the contract that say that something else than a Triton kernel did the work."""


def chosen(text: str) -> tuple[str, str | None]:
    """Read ``--gradings``.

    Args:
        text: one grading, or two with a comma between them.

    Returns:
        The grading of the report, and the second one or ``None``.

    Raises:
        UsageError: an unknown grading, the same one twice, or more than two.
    """
    names = [n.strip() for n in text.split(",")]
    for name in names:
        if name not in GRADINGS:
            raise UnknownName("grading", name, GRADINGS)
    if len(names) > 2 or len(set(names)) < len(names):
        raise UsageError(f"--gradings is {text!r}; one grading, or two different ones: contract,paper")
    return names[0], names[1] if len(names) == 2 else None


def grade_beside(
    askers: Sequence[Asker], tasks: Sequence[Task], found: Mapping[str, Mapping[tuple[str, int], Answer]], grading: str,
    progress: Callable[[], None] = lambda: None,
) -> dict[str, dict[tuple[str, int], Outcome]]:  # fmt: skip
    """Grade every judged answer that has a source under another grading, untimed.

    Args:
        askers: the policies.
        tasks: the tasks.
        found: answers by policy, and by task and sample.
        grading: the other grading.
        progress: called after each grading.

    Returns:
        Gradings by policy, and by task and sample.
    """
    by_id = {t.id: t for t in tasks}
    jobs = {}
    for asker in askers:
        answers = found[asker.spec]
        wanted = {k: a.outcome.source_sha256 for k, a in answers.items() if a.outcome.source_sha256 and not _masked(a.outcome)}
        options = {**asker.options, "grading": grading, "timing": False}
        options.pop("compiled", None)  # it needs times
        for row in asker.store.records(policy=asker.spec, sources=True):
            key = (row.task, row.sample)
            if row.source is None or row.sha != wanted.get(key):
                continue
            del wanted[key]  # an earlier run may have left a second row of the same source
            record = {**asker.about, "fingerprint": by_id[row.task].fingerprint}
            name = f"{asker.spec} ({grading})"
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
) -> list[dict[str, Any]]:  # fmt: skip
    """Return the answers that are correct under one grading only.

    Args:
        answers: by task and sample.
        other: their gradings under the other grading.

    Returns:
        Rows sorted by task, with ``why`` from ``why``; masked answers are left out.
    """
    rows = []
    for (task, sample), second in sorted(other.items()):
        first = answers[task, sample].outcome
        if _masked(second) or first.correct == second.correct:
            continue
        failed = second if first.correct else first
        rows.append({
            "task": task, "sample": sample, first.grading: str(first.verdict), second.grading: str(second.verdict),
            "why": why(failed), "message": failed.message,
        })  # fmt: skip
    return rows


def beside(
    answers: Mapping[tuple[str, int], Answer], other: Mapping[tuple[str, int], Outcome], grading: str,
    summarise: Callable[[Sequence[Outcome]], Mapping[str, Any]],
) -> dict[str, Any]:  # fmt: skip
    """Return the comparison of the two gradings for ``report.json``.

    Args:
        answers: of the report, by task and sample.
        other: their gradings under the other grading.
        grading: the other grading.
        summarise: makes the summary of outcomes.

    Returns:
        ``grading``, ``summary``, ``by_category`` (judged answers, and how many are correct under each grading), ``reasons``
        (counts, by the grading that rejects) and ``differs``.
    """
    rows = differences(answers, other)
    by_category: dict[str, dict[str, int]] = {}
    for (task, sample), second in sorted(other.items()):
        first = answers[task, sample].outcome
        if _masked(second):
            continue
        sums = by_category.setdefault(task.partition("/")[0], {"n": 0, first.grading: 0, second.grading: 0})
        sums["n"] += 1
        sums[first.grading] += first.correct
        sums[second.grading] += second.correct
    reasons = {g: dict(Counter(r["why"] for r in rows if r[g] != str(Verdict.CORRECT)).most_common()) for g in GRADINGS}
    return {
        "grading": grading, "summary": summarise(list(other.values())), "by_category": by_category, "reasons": reasons,
        "differs": rows,
    }  # fmt: skip


def why(failed: Outcome) -> str:
    """Say in two or three words why one of two gradings rejects an answer that the other accepts.

    Args:
        failed: the outcome that is not correct.

    Returns:
        The first reason: a rule that was broken, or what is special about the first case that failed.
    """
    task = load_task(failed.task)
    return _published(task, failed) if failed.grading == "paper" else _contract(task, failed)


def _contract(task: Task, failed: Outcome) -> str:
    """Say why the contract rejects an answer."""
    rules = [v.rule for v in failed.violations]
    if rules:
        known = dict.fromkeys(_BY_TORCH, "torch did the work") | {"contract": "quantization scheme"}
        return known.get(rules[0], "forbidden code")
    if failed.verdict is Verdict.MALFORMED:
        return "entry or parameters"
    if failed.verdict is Verdict.INFRA_FAULT:
        return "not judged"
    case = _first_failing(task, failed)
    if case is None:
        return "does not compile"
    special = _special(task, case)
    if special:
        return special
    if failed.verdict is not Verdict.INCORRECT:
        return "memory access" if "out-of-bounds" in failed.message else "sizes and arguments"
    return "accuracy" if _accuracy(task, failed) else "sizes and arguments"


def _first_failing(task: Task, failed: Outcome) -> Case | None:
    """Return the contract's case at which a grading ended, or the first wrong one; ``None`` before the first case."""
    cases = [c for c in task.cases if failed.manifest.get("split") != "train" or not c.held]
    counts = failed.cases
    if counts is None:
        return None
    if counts.failures:
        label = counts.failures[0].case
        return next((c for c in cases if c.label() == label), None)
    return cases[counts.passed] if counts.passed < len(cases) else None


def _special(task: Task, case: Case) -> str:
    """Return what a case of the contract asks for and no published case of the task does; empty if that is not clear."""
    from kbx_env.spec.published import published_task

    published = published_task(task.id).cases
    if case.layouts and not any(c.layouts for c in published):
        return "strides"
    if any(0 in (v if isinstance(v, tuple) else (v,)) for v in case.axes.values()):
        return "empty tensors"
    known = {d for c in published for d in c.dtypes.values()}
    if set(case.dtypes.values()) - known:
        return "dtypes"
    if case.out and not any(c.out for c in published):
        return "out="
    if set(case.args) - {k for c in published for k in c.args}:
        return "sizes and arguments"
    return ""


def _accuracy(task: Task, failed: Outcome) -> bool:
    """Whether wrong values occur at sizes of the published cases, too: then it is not the size that breaks the kernel."""
    from kbx_env.spec.published import published_task

    labels = {f.case for f in failed.cases.failures if "wrong values" in f.reason} if failed.cases is not None else set()
    wrong = [c for c in task.cases if c.label() in labels and not c.layouts and not _special(task, c)]
    most = max((math.prod(s) for c in published_task(task.id).cases for s in c.shapes.values()), default=0)
    return any(math.prod(n for v in c.axes.values() for n in (v if isinstance(v, tuple) else (v,))) <= most for c in wrong)


def _published(task: Task, failed: Outcome) -> str:
    """Say why the paper's check rejects an answer."""
    from kbx_env.tasks._published import REFERENCES

    if failed.violations:
        return "forbidden code"
    if failed.verdict is Verdict.INFRA_FAULT:
        return "not judged"
    if "published gate" in failed.message:
        return "the published gate"
    if isinstance(task.truth, Dropout | Sample | Windows):
        return "torch's random stream"
    if task.category == "quantization":
        return "unquantized reference"
    if isinstance(task.truth, Invariant) or "atol=0" in failed.message:
        return "torch's own factors or bits"
    if task.id in REFERENCES:
        return "another reference"
    return "absolute tolerance" if failed.verdict is Verdict.INCORRECT else "sizes and arguments"


def _masked(o: Outcome) -> bool:
    return o.fault is Fault.INFRA
