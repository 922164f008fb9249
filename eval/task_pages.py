"""Writes an HTML page for each task of a report: the task, each policy's answers, and their gradings.

A page needs no other file: no script, no font, no picture. Texts of models are only ever text on it. Every source is
written beside the pages byte by byte as it was submitted, so that one command grades it again.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import shlex
from collections.abc import Container, Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kbx_env.eval.escaping import clip
from kbx_env.eval.pages.render import render
from kbx_env.eval.report_data import PolicyStudy, Row, Study

from kbx_env.envs.prompt import feedback
from kbx_env.errors import KbxError, UsageError
from kbx_env.outcome import Outcome
from kbx_env.spec.catalog import load_task
from kbx_env.spec.task import Task
from kbx_env.store import Store
from kbx_env.store.schema import unpack_source

PAGES, SOURCES = "tasks", "sources"
"""Subfolders of the report."""
ANSWERS = 8
"""The most answers of one policy on a page: a page of a thousand samples is too long to read."""
_ROWS = 60
"""The most rows of one table."""


@dataclass(frozen=True)
class _Answer:
    policy: PolicyStudy
    row: Row
    source: bytes | None


def write_task_pages(study: Study, store_path: str | Path | None, folder: str | Path) -> dict[str, str]:
    """Write ``tasks/<category>-<name>.html`` for each task, and ``sources/<category>-<name>/<policy>-<sample>.py``.

    Args:
        study: the answers.
        store_path: the run's ``gradings.sqlite``; for ``None`` or a file that does not exist, pages have no sources.
        folder: of the report.

    Returns:
        Task -> its page, relative to the folder.

    Raises:
        UsageError: the file is no store, or the folder cannot be written.
    """
    out, written = Path(folder), {}
    try:
        (out / PAGES).mkdir(parents=True, exist_ok=True)
        with contextlib.closing(_by_task(study, store_path)) as each:
            for task, answers in each:
                name = _slug(task)
                page = f"{PAGES}/{name}.html"
                (out / page).write_text(_page(task, answers, out), encoding="utf-8", errors="backslashreplace")
                written[task] = page
    except OSError as e:
        raise UsageError(f"cannot write pages to {str(folder)!r}: {e.strerror or e}; choose another folder") from e
    return written


def source_file(policy: str, task: str, sample: int) -> str:
    """Return the file of an answer's source, relative to the report.

    Args:
        policy: name of the policy.
        task: the task.
        sample: number of the answer, from 0.

    Returns:
        The path; the file exists for the answers that the task's page shows.
    """
    return f"{SOURCES}/{_slug(task)}/{_slug(policy)}-{sample}.py"


def command(row: Row, manifest: Mapping[str, Any], file: str) -> str:
    """Return the shell command that grades a source again with the options of the run.

    Args:
        row: the answer.
        manifest: of the run.
        file: the source, relative to the folder in which the command is run.

    Returns:
        The command, quoted for a shell.
    """

    def said(key: str) -> Any:
        own = row.raw.get(key) if key in ("backend", "grading") else None
        return own if own is not None else manifest.get(key)

    parts = ["python", "-m", "kbx_env", "grade", row.task, file]
    for key in ("backend", "grading", "torch_ops", "sizes"):
        if said(key) is not None:
            parts += [f"--{key.replace('_', '-')}", str(said(key))]
    targets = manifest.get("targets")
    if isinstance(targets, list):
        parts += ["--targets", ",".join(map(str, targets)) or "none"]
    for key in ("seed", "estimate"):
        if said(key) is not None:
            parts += [f"--{key}", str(said(key))]
    return shlex.join(parts + (["--no-timing"] if manifest.get("timing") is False else [])
                      + (["--compiled"] if manifest.get("compiled") is True else []))  # fmt: skip


def _by_task(study: Study, store_path: str | Path | None) -> Generator[tuple[str, list[_Answer]], None, None]:
    """Yield tasks in order with their answers. Only one task's sources are in memory: a large run's do not fit."""
    rows: dict[str, list[tuple[PolicyStudy, Row]]] = {}
    for p in study.policies:
        by_task: dict[str, list[Row]] = {}
        for r in p.rows:
            by_task.setdefault(r.task, []).append(r)
        for task, answers in by_task.items():
            rows.setdefault(task, []).extend((p, r) for r in _few(answers))
    with contextlib.ExitStack() as stack:
        reads: dict[str, _Sources] = {}
        if store_path is not None and Path(store_path).is_file():
            store = stack.enter_context(contextlib.closing(Store(store_path)))
            for p in study.policies:
                reads[p.name] = stack.enter_context(contextlib.closing(_Sources(store, p.spec)))
        for task in sorted(rows, key=lambda t: t.encode("utf-8", "surrogatepass")):  # as SQLite sorts
            shas = {_sha(r) for _, r in rows[task]}
            found = {name: reader.of(task, shas) for name, reader in reads.items()}
            yield task, [_Answer(p, r, found.get(p.name, {}).get(_sha(r))) for p, r in rows[task]]


def _few(rows: Sequence[Row]) -> list[Row]:
    """Return at most ``ANSWERS`` answers in their order: correct ones before others, fast ones first."""
    best = sorted(rows, key=lambda r: (not r.correct, -(r.speedup or 0.0), r.sample))[:ANSWERS]
    return sorted(best, key=lambda r: r.sample)


def _sha(row: Row) -> str:
    return str(row.raw.get("source_sha256") or "")


class _Sources:
    """Reads the sources of one policy task by task, in the store's own order, so that each row of the file is read once."""

    def __init__(self, store: Store, policy: str) -> None:
        self._read = store.sources(policy)
        self._next = next(self._read, None)

    def of(self, task: str, wanted: Container[str]) -> dict[str, bytes]:
        """Return sources of a task, found by content: a store may hold other gradings of the same policy and sample.

        Args:
            task: the task; not before an earlier one in the store's order.
            wanted: SHA-256 digests.

        Returns:
            SHA-256 -> source.
        """
        found: dict[str, bytes] = {}
        goal = task.encode("utf-8", "surrogatepass")
        while self._next is not None and (on := self._next[0]).encode("utf-8", "surrogatepass") <= goal:
            _, sha, data = self._next
            if on == task and sha in wanted and sha not in found:
                found[sha] = unpack_source(data)
            self._next = next(self._read, None)
        return found

    def close(self) -> None:
        """Close the reader."""
        self._read.close()


def _slug(text: str) -> str:
    """Return a file name for a text that is valid everywhere and has no folders; different texts get different names."""
    if re.fullmatch(r"[a-z0-9]+/[A-Za-z0-9_]+", text):  # a task
        return text.replace("/", "-")
    kept = re.sub(r"[^A-Za-z0-9_.]+", "-", text).strip(".-")[:80] or "x"
    return kept if kept == text else f"{kept}-{hashlib.sha256(text.encode('utf-8', 'surrogatepass')).hexdigest()[:8]}"


@dataclass(frozen=True)
class _Table:
    """A table of an answer's section: headers, CSS classes of the columns, rows, and how many more rows are not shown."""

    title: str
    head: Sequence[str]
    styles: Sequence[str]
    rows: Sequence[Sequence[str]]
    more: int


@dataclass(frozen=True)
class _SourceView:
    """A source, and how to grade it again."""

    text: str
    note: str
    command: str
    file: str
    size: int
    hints: str


@dataclass(frozen=True)
class _AnswerView:
    """An answer as the template shows it; ``source`` is a text that says why there is none, if there is none."""

    label: str
    verdict: str
    verdict_class: str
    speedup: str
    open: bool
    source: _SourceView | str
    feedback: str
    tables: Sequence[_Table]


def _page(task: str, answers: Sequence[_Answer], out: Path) -> str:
    several = len({a.policy.name for a in answers}) > 1
    names = [a.policy.name for a in answers]
    description, changed = _description(task, answers)
    return render(
        "task.html.j2", task=task, description=description, changed=changed, crowded=max(map(names.count, names)) == ANSWERS,
        most=ANSWERS, answers=[_view(a, out, opened=i == 0 or not several) for i, a in enumerate(answers)],
    )  # fmt: skip


def _description(task: str, answers: Sequence[_Answer]) -> tuple[dict[str, Any] | None, bool]:
    """Return the task's texts, ``None`` for a task that is not known, and whether the task has changed since an answer."""
    try:
        t: Task | None = load_task(task)
    except KbxError:
        t = None
    if t is None or t.id != task:
        return None, False
    manifests = [m for a in answers if isinstance(m := a.row.raw.get("manifest"), Mapping)]
    graded = {m.get("task_fingerprint") for m in manifests} - {None, t.fingerprint}
    texts = {"signature": f"def {t.entry}{t.signature}", "text": t.spec, "category": t.category, "difficulty": t.difficulty}
    return texts, bool(graded)


def _view(a: _Answer, out: Path, opened: bool) -> _AnswerView:
    row = a.row
    try:
        outcome = Outcome.from_dict(row.raw)
        said, tables = feedback(outcome), [_failures(outcome), _timing(outcome), _builds(outcome)]
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        said, tables = f"the report's row contradicts itself: {type(e).__name__}: {e}", []
    speedup = "" if row.speedup is None else f"{row.speedup:.3f}x" if isinstance(row.speedup, int | float) else "–"
    return _AnswerView(
        label=f"{a.policy.name} #{row.sample + 1}", verdict=row.verdict.replace("_", " "),
        verdict_class=row.verdict if re.fullmatch(r"[a-z_]+", row.verdict) else "", speedup=speedup, open=opened,
        source=_source(a, out), feedback=clip(said[:4000])[0],
        tables=[t for t in (*tables, _turns(row)) if t is not None],
    )  # fmt: skip


def _source(a: _Answer, out: Path) -> _SourceView | str:
    """Write an answer's source to its file; return its view, or why there is no source."""
    if a.source is None:
        return "the policy handed in none" if not _sha(a.row) else "the run's gradings.sqlite is not at hand or does not hold it"
    file = source_file(a.policy.name, a.row.task, a.row.sample)
    (out / file).parent.mkdir(parents=True, exist_ok=True)
    (out / file).write_bytes(a.source)
    text, note = clip(a.source.decode("utf-8", "backslashreplace"))
    m = a.policy.manifest
    hints = ["in the report's folder"]
    if m.get("seed") is None:
        hints.append("inputs are drawn anew each time")
    if m.get("split") == "train":
        hints.append("the run left the held-out cases out, this command does not")
    return _SourceView(text, note, command(a.row, m, file), file, len(a.source), "; ".join(hints))


def _table(title: str, head: Sequence[str], rows: Sequence[Sequence[Any]]) -> _Table | None:
    """Return a table of at most ``_ROWS`` rows, ``None`` for no row."""
    if not rows:
        return None
    styles = [_style(c) for c in zip(*rows)]
    return _Table(title, head, styles, [[_cell(c) for c in r] for r in rows[:_ROWS]], max(0, len(rows) - _ROWS))


def _style(values: Sequence[Any]) -> str:
    """Return the CSS class of a column with these values."""
    if not any(isinstance(v, str) for v in values):
        return "num"
    return "long" if any(len(str(v)) > 30 for v in values) else "short"


def _cell(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.3f}" if isinstance(value, float) else str(value)[:600]


def _failures(o: Outcome) -> _Table | None:
    return _table("Failing cases", ("case", "reason"), [(f.case, f.reason) for f in (o.cases.failures if o.cases else ())])


def _timing(o: Outcome) -> _Table | None:
    rows = []
    for c in o.timing.cases if o.timing else ():
        marks = [w for w, on in (("disturbed", c.disturbed), ("void", c.void)) if on]
        low_high = f"{c.low:.3f} to {c.high:.3f}"
        how = ", ".join([c.method, *marks])
        rows.append((c.case, c.eager_us, c.candidate_us, c.speedup, low_high, c.floor_us, c.pairs, how, c.compiled_us))
    head = ("case", "eager µs", "kernel µs", "speedup", "95 % interval", "floor µs", "pairs", "how", "torch.compile µs")
    title = f"Times on {o.timing.device}" if o.timing else "Times"
    if all(row[-1] is None for row in rows):
        return _table(title, head[:-1], [row[:-1] for row in rows])
    return _table(title, head, rows)


def _builds(o: Outcome) -> _Table | None:
    rows = [
        (b.kernel, b.target, b.ok, b.registers, b.spills, b.shared, b.shared_limit, b.warps, (b.error or "").split("\n")[0])
        for b in o.compile
    ]
    head = ("kernel", "target", "builds", "registers", "spills (B)", "shared (B)", "limit (B)", "warps", "error")
    return _table("Builds", head, rows)


def _turns(row: Row) -> _Table | None:
    rows = [(t.get("label"), str(t.get("verdict")), t.get("speedup")) for t in row.turns if isinstance(t, Mapping)]
    return _table("On the way", ("turn", "verdict", "speedup"), rows)
