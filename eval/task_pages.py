"""One HTML page for each task of a report: what was asked, what every policy answered, what the grader said of it.

A page needs nothing but itself: no script, no font, no picture. What models wrote is text on it and nothing else. Every source
lies beside the pages as it was handed in, byte by byte, so that one command grades it again.
"""

from __future__ import annotations

import contextlib
import hashlib
import html
import re
import shlex
from collections.abc import Container, Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kbx_env.eval import pages
from kbx_env.eval.highlight import clip, highlight, plain
from kbx_env.eval.report_data import PolicyStudy, Row, Study

from kbx_env.envs.prompt import feedback
from kbx_env.errors import KbxError, UsageError
from kbx_env.outcome import Outcome
from kbx_env.spec.catalog import load_task
from kbx_env.spec.task import Task
from kbx_env.store import Store
from kbx_env.store.schema import unpack_source

PAGES, SOURCES = "tasks", "sources"
ANSWERS = 8
"""Answers of one policy on a page at most: a thousand samples make a page that nobody opens."""
_ROWS = 60
"""Lines of one table at most."""
_CSS = """
a { color: inherit; } pre { margin: .4rem 0; padding: .7rem .8rem; overflow-x: auto; background: var(--page);
  border: 1px solid var(--line); border-radius: .4rem; font: 12.5px/1.5 ui-monospace, Menlo, Consolas, monospace; tab-size: 4;
  direction: ltr; unicode-bidi: isolate; }
pre.wrap { white-space: pre-wrap; overflow-wrap: anywhere; } pre.source { max-height: 44rem; }
details span[id] { scroll-margin-top: 4rem; }
h3 { font-size: .95rem; margin: 1rem 0 .2rem; } .note { color: var(--dim); font-size: .83rem; margin: .3rem 0; }
h1, summary, td { overflow-wrap: anywhere; } .short { white-space: nowrap; }
td.long { min-width: 14rem; white-space: normal; } summary .v, summary small { margin-left: .6rem; }
:root { --k: #8a2fa8; --s: #20703c; --c: #6a6e75; --n: #a8500f; --d: #1c57b5; --b: #0f6f80; --h: #b3261e; }
@media (prefers-color-scheme: dark) { :root { --k: #d59bf0; --s: #8fd19e; --c: #979da5; --n: #eeb07a; --d: #8fb8ff; --b: #7fd0dd;
  --h: #ff9a90; } }
.k { color: var(--k); } .s { color: var(--s); } .c { color: var(--c); font-style: italic; } .n { color: var(--n); }
.d { color: var(--d); } .b { color: var(--b); } .h { color: var(--h); border: 1px dotted; border-radius: 2px; font-size: .9em; }
"""
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
"""What a browser may load for a page, were a text ever to escape its escaping: nothing."""


@dataclass(frozen=True)
class _Answer:
    policy: PolicyStudy
    row: Row
    source: bytes | None


def write_task_pages(study: Study, store_path: str | Path | None, folder: str | Path) -> dict[str, str]:
    """Write ``tasks/<category>-<name>.html`` for each task, and ``sources/<category>-<name>/<policy>-<sample>.py``.

    Args:
        study: the answers.
        store_path: the run's ``gradings.sqlite``; ``None``, or a file that is not there: pages without sources.
        folder: of the report.

    Returns:
        Task -> its page, relative to the folder.

    Raises:
        UsageError: the store is none, or the folder cannot be written.
    """
    out, written = Path(folder), {}
    try:
        (out / PAGES).mkdir(parents=True, exist_ok=True)
        with contextlib.closing(_by_task(study, store_path)) as each:
            for task, answers in each:
                name = _slug(task)
                page = f"{PAGES}/{name}.html"
                (out / page).write_text(_page(task, name, answers, out), encoding="utf-8", errors="backslashreplace")
                written[task] = page
    except OSError as e:
        raise UsageError(f"cannot write pages to {str(folder)!r}: {e.strerror or e}; choose another folder") from e
    return written


def command(row: Row, manifest: Mapping[str, Any], file: str) -> str:
    """The shell command that grades a source again with the options of the run.

    Args:
        row: the answer.
        manifest: of the run.
        file: the source, as seen from where the command is run.
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
    """Tasks in order, with the sources of one task at a time: those of a large run do not fit into memory."""
    rows: dict[str, list[tuple[PolicyStudy, Row]]] = {}
    for p in study.policies:
        mine: dict[str, list[Row]] = {}
        for r in p.rows:
            mine.setdefault(r.task, []).append(r)
        for task, answers in mine.items():
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
    """At most ``ANSWERS``, in their order: the correct ones first, the fastest of them before all."""
    best = sorted(rows, key=lambda r: (not r.correct, -(r.speedup or 0.0), r.sample))[:ANSWERS]
    return sorted(best, key=lambda r: r.sample)


def _sha(row: Row) -> str:
    return str(row.raw.get("source_sha256") or "")


class _Sources:
    """The sources of one policy, task by task in the store's own order: each row of the file is read once."""

    def __init__(self, store: Store, policy: str) -> None:
        self._read = store.sources(policy)
        self._next = next(self._read, None)

    def of(self, task: str, wanted: Container[str]) -> dict[str, bytes]:
        """SHA-256 -> source. By content: a file may hold other gradings of the same policy, task and sample."""
        found: dict[str, bytes] = {}
        goal = task.encode("utf-8", "surrogatepass")
        while self._next is not None and (on := self._next[0]).encode("utf-8", "surrogatepass") <= goal:
            _, sha, data = self._next
            if on == task and sha in wanted and sha not in found:
                found[sha] = unpack_source(data)
            self._next = next(self._read, None)
        return found

    def close(self) -> None:
        """Let go of the file."""
        self._read.close()


def _slug(text: str) -> str:
    """A name that is a file's name everywhere and leads nowhere else; unlike names stay unlike."""
    if re.fullmatch(r"[a-z0-9]+/[A-Za-z0-9_]+", text):  # a task
        return text.replace("/", "-")
    kept = re.sub(r"[^A-Za-z0-9_.]+", "-", text).strip(".-")[:80] or "x"
    return kept if kept == text else f"{kept}-{hashlib.sha256(text.encode('utf-8', 'surrogatepass')).hexdigest()[:8]}"


def _page(task: str, name: str, answers: Sequence[_Answer], out: Path) -> str:
    template = (Path(pages.__file__).parent / "report.html").read_text(encoding="utf-8")
    style = re.search(r"<style>(.*?)</style>", template, re.S)
    several = len({a.policy.name for a in answers}) > 1
    body = [
        '<p class="manifest"><a href="../report.html">report</a></p>', f"<h1>{plain(task)}</h1>", _asked(task, answers),
        _overview(answers) if len(answers) > 1 else "", *(_section(a, i, name, out, several) for i, a in enumerate(answers)),
    ]  # fmt: skip
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<title>{plain(task)}</title>\n'
        f"<style>{style[1] if style else ''}{_CSS}</style></head>\n<body>\n" + "\n".join(body) + "\n</body></html>\n"
    )


def _asked(task: str, answers: Sequence[_Answer]) -> str:
    try:
        t: Task | None = load_task(task)
    except KbxError:
        t = None
    if t is None or t.id != task:
        return '<p class="note">This version of kbx_env has no such task: its text is not known here.</p>'
    abouts = [m for a in answers if isinstance(m := a.row.raw.get("manifest"), Mapping)]
    graded = {m.get("task_fingerprint") for m in abouts} - {None, t.fingerprint}
    changed = '<p class="note">The task has changed since it was graded; this is its text of today.</p>' if graded else ""
    return (
        f"<details open><summary>The task</summary>{changed}<pre class=\"wrap\">{highlight(f'def {t.entry}{t.signature}')}</pre>"
        f'<pre class="wrap">{plain(t.spec)}</pre><p class="note">{plain(t.category)}, difficulty {t.difficulty}</p></details>'
    )


def _verdict(row: Row) -> str:
    known = row.verdict if re.fullmatch(r"[a-z_]+", row.verdict) else ""
    return f'<span class="v {known}">{plain(row.verdict.replace("_", " "))}</span>'


def _label(a: _Answer) -> str:
    return f"{a.policy.name} #{a.row.sample + 1}"


def _speed(row: Row) -> str:
    return f"{row.speedup:.3f}x" if isinstance(row.speedup, int | float) else "–"


def _overview(answers: Sequence[_Answer]) -> str:
    rows = "".join(
        f'<tr><td><a href="#a{i}">{plain(_label(a))}</a></td><td>{_verdict(a.row)}</td><td class="num">{_speed(a.row)}</td></tr>'
        for i, a in enumerate(answers)
    )
    names = [a.policy.name for a in answers]
    more = f"At most {ANSWERS} answers of a policy, correct and fast ones first; all of them are in tasks.csv."
    note = f'<p class="note">{more}</p>' if max(map(names.count, names)) == ANSWERS else ""
    return f'<details open><summary>Answers</summary><div class="wide"><table>{rows}</table></div>{note}</details>'


def _section(a: _Answer, index: int, name: str, out: Path, several: bool) -> str:
    row = a.row
    try:
        outcome = Outcome.from_dict(row.raw)
        said, facts = feedback(outcome), [_failures(outcome), _timing(outcome), _builds(outcome)]
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        said, facts = f"the report's row contradicts itself: {type(e).__name__}: {e}", []
    speed = f"<small>{_speed(row)}</small>" if row.speedup is not None else ""
    heard = f'<h3>Feedback</h3><pre class="wrap">{plain(clip(said[:4000])[0])}</pre>'
    parts = [_source(a, name, out), heard, *facts, _turns(row)]
    opened = " open" if index == 0 or not several else ""
    head = f"<summary>{plain(_label(a))}{_verdict(row)}{speed}</summary>"
    # The mark lies inside: browsers open a closed one to show what a link points into.
    return f'<details{opened}>{head}<span id="a{index}"></span>{"".join(parts)}</details>'


def _source(a: _Answer, name: str, out: Path) -> str:
    if a.source is None:
        why = "the policy handed in none" if not _sha(a.row) else "the run's gradings.sqlite is not at hand or does not hold it"
        return f'<p class="note">No source: {why}.</p>'
    file = f"{SOURCES}/{name}/{_slug(a.policy.name)}-{a.row.sample}.py"
    (out / file).parent.mkdir(parents=True, exist_ok=True)
    (out / file).write_bytes(a.source)
    text, note = clip(a.source.decode("utf-8", "backslashreplace"))
    m = a.policy.manifest
    hints = ["in the report's folder"]
    if m.get("seed") is None:
        hints.append("inputs are drawn anew each time")
    if m.get("split") == "train":
        hints.append("the run left the held-out cases out, this command does not")
    return (
        f'<h3>Source</h3><pre class="source">{highlight(text)}</pre>'
        + (f'<p class="note">{note}; the whole is in the file.</p>' if note else "")
        + f'<h3>Grade it again</h3><pre class="wrap">{plain(command(a.row, m, file))}</pre>'
        f'<p class="note"><a href="../{html.escape(file)}">{plain(file)}</a>, {len(a.source):,} bytes; '
        f"run it {'; '.join(hints)}.</p>"
    )


def _table(title: str, head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    if not rows:
        return ""
    kinds = [_column(c) for c in zip(*rows)]
    body = "".join("<tr>" + "".join(f"<td{k}>{_cell(c)}</td>" for k, c in zip(kinds, r)) + "</tr>" for r in rows[:_ROWS])
    more = f'<p class="note">{len(rows) - _ROWS:,} more are not shown.</p>' if len(rows) > _ROWS else ""
    heads = "".join(f"<th{k}>{h}</th>" for h, k in zip(head, kinds))
    return f'<h3>{title}</h3><div class="wide"><table><tr>{heads}</tr>{body}</table></div>{more}'


def _column(values: Sequence[Any]) -> str:
    if not any(isinstance(v, str) for v in values):
        return ' class="num"'
    return ' class="long"' if any(len(str(v)) > 30 for v in values) else ' class="short"'


def _cell(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.3f}" if isinstance(value, float) else plain(str(value)[:600])


def _failures(o: Outcome) -> str:
    return _table("Failing cases", ("case", "reason"), [(f.case, f.reason) for f in (o.cases.failures if o.cases else ())])


def _timing(o: Outcome) -> str:
    rows = []
    for c in o.timing.cases if o.timing else ():
        marks = [w for w, on in (("disturbed", c.disturbed), ("void", c.void)) if on]
        low_high = f"{c.low:.3f} to {c.high:.3f}"
        how = ", ".join([c.method, *marks])
        rows.append((c.case, c.eager_us, c.candidate_us, c.speedup, low_high, c.floor_us, c.pairs, how, c.compiled_us))
    head = ("case", "eager µs", "kernel µs", "speedup", "95 % interval", "floor µs", "pairs", "how", "torch.compile µs")
    if all(row[-1] is None for row in rows):
        return _table(_where(o), head[:-1], [row[:-1] for row in rows])
    return _table(_where(o), head, rows)


def _where(o: Outcome) -> str:
    return f"Times on {plain(o.timing.device)}" if o.timing else "Times"


def _builds(o: Outcome) -> str:
    rows = [
        (b.kernel, b.target, b.ok, b.registers, b.spills, b.shared, b.shared_limit, b.warps, (b.error or "").split("\n")[0])
        for b in o.compile
    ]
    head = ("kernel", "target", "builds", "registers", "spills (B)", "shared (B)", "limit (B)", "warps", "error")
    return _table("Builds", head, rows)


def _turns(row: Row) -> str:
    rows = [(t.get("label"), str(t.get("verdict")), t.get("speedup")) for t in row.turns if isinstance(t, Mapping)]
    return _table("On the way", ("turn", "verdict", "speedup"), rows)
