"""Ranks the policies of several people's reports; refuses reports that cannot be compared.

    python eval/leaderboard.py runs/expert friend/report.json --out leaderboard.html

The order is by correct rate, then by geometric-mean speedup. Rates are means over tasks, so that more samples of easy
tasks do not raise them. The Wilson interval counts tasks, since samples of one task are not independent. All numbers
are counted from the rows, and rows are checked for contradictions; the reports' own sums are not trusted.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import math
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kbx_env.eval import stats
from kbx_env.eval.pages import formatting
from kbx_env.eval.pages.render import render
from kbx_env.eval.report import pass_at, spending, summarise
from kbx_env.eval.report_data import FILE, PUBLISHED, PolicyStudy, read

from kbx_env.errors import UsageError
from kbx_env.outcome import Fault, Outcome, Stage, Verdict

UNSAID = "not said"
"""A condition that a report does not state."""
_READ = "Intervals that overlap do not say who is better. Rates are means over tasks. Policies that read verdicts are helped more."
_KEYS = {"grading": "grading", "backend": "backend", "torch_ops": "torch_ops", "held-out cases": "split",
         "timed sizes": "sizes", "precision of times": "precision", "defences switched off": "without"}  # fmt: skip
"""Conditions that must be equal -> their key in a manifest or a row."""
_MAY_DIFFER = {"task_set": "versions of the task set",
               "kbx_env": "versions of kbx_env", "grader": "versions of the grader's code", "torch": "versions of torch",
               "triton": "versions of triton", "seed_policy": "seeds", "machine": "kinds of machine"}  # fmt: skip
"""Keys of a manifest that may differ -> their name in a note."""
_REMEDY = {
    "grading": "grade all with the same --grading", "backend": "grade all with the same --backend",
    "torch_ops": "grade all with the same --torch-ops", "held-out cases": "grade all with --split eval, or all with --split train",
    "timed sizes": "grade all with the same --sizes", "precision of times": "grade all with the same --precision",
    "defences switched off": "grade all with every defence", "task versions": "grade all with the same tasks (git log tasks/)",
    "choice of tasks": "grade all with the same --split and --tasks",
    "device of the speedups": "time all on the same kind of device, or leave speedups out with --no-speedups",
}  # fmt: skip
"""Difference -> what to do about it."""


class Incomparable(UsageError):
    """Reports that must not be ranked together: one line for each difference, with its remedy."""


@dataclasses.dataclass(frozen=True)
class Entry:
    """One policy of one report; ``None`` is not known.

    Attributes:
        rank: from 1; equal policies share a rank.
        policy: its name.
        report: the report's folder.
        correct_rate: mean over tasks with a judged answer.
        low: lower end of its Wilson interval.
        high: upper end of its Wilson interval.
        answers: judged answers.
        masked: answers without a verdict.
        correct: correct answers.
        tasks: number of tasks with a judged answer.
        speedup: geometric mean over the timed correct answers.
        timed: number of timed correct answers.
        common_speedup: geometric mean over the tasks that all entries solve, so that solving easy tasks only does not
            look fast.
        common: number of these tasks.
        pass_at: k -> pass@k.
        calls: of a language model.
        tokens: of a language model.
        least: whether ``calls`` and ``tokens`` are lower bounds, because some answers do not report them.
        gradings: verdicts that the policy received.
        needs: what it uses besides the task's text.
        model: the language model.
        device: of the run.
        kbx_env: version.
    """

    rank: int
    policy: str
    report: str
    correct_rate: float | None
    low: float | None
    high: float | None
    answers: int
    masked: int
    correct: int
    tasks: int
    speedup: float | None
    timed: int
    common_speedup: float | None
    common: int
    pass_at: Mapping[str, float]
    calls: float | None
    tokens: float | None
    least: bool
    gradings: float | None
    needs: tuple[str, ...] | None
    model: str | None
    device: str
    kbx_env: str


@dataclasses.dataclass(frozen=True)
class Board:
    """The ranking.

    Attributes:
        entries: by rank.
        about: what all reports have in common.
        notes: what a reader must know.
    """

    entries: tuple[Entry, ...]
    about: Mapping[str, Any]
    notes: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class _Read:
    """One policy, counted from its rows: each answer once, with its outcome."""

    study: PolicyStudy
    outcomes: tuple[Outcome, ...]
    notes: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"{self.study.name} ({self.study.source or 'this run'})"

    @functools.cached_property
    def versions(self) -> dict[str, set[str]]:
        """Task -> its fingerprints. A correct answer must have one; a wrong answer may have none."""
        found: dict[str, set[str]] = {}
        for o in self.outcomes:
            said = o.manifest.get("task_fingerprint")
            if said or o.correct:
                found.setdefault(o.task, set()).add(str(said or UNSAID)[:12])
        return found

    @property
    def timings(self) -> list[tuple[str, float, str]]:
        """(task, speedup, device) of each timed answer."""
        return [(o.task, o.timing.speedup, o.timing.device) for o in self.outcomes if o.timing is not None]


def leaderboard(paths: Sequence[str | Path], speedups: bool = True) -> Board:
    """Rank the policies of reports.

    Args:
        paths: folders of reports, or their report.json.
        speedups: rank speedups too; without them, reports of different devices can be compared.

    Returns:
        The ranking.

    Raises:
        UsageError: a path holds no report, or is given twice; ``Incomparable`` if the reports cannot be compared.
    """
    return _ranked(_read(paths), speedups)


def inconsistencies(path: str | Path) -> tuple[str, ...]:
    """Find what a report contradicts itself in: its own sums, or rows that cannot be true.

    Args:
        path: the folder of the report, or its report.json.

    Returns:
        One line for each contradiction.

    Raises:
        UsageError: the path holds no report.
    """
    return tuple(n for f in _read([path]) for n in f.notes)


def _read(paths: Sequence[str | Path]) -> list[_Read]:
    """Read the policies of reports, each counted anew from its rows."""
    seen, found = dict[Path, str](), list[_Read]()
    for path in map(str, paths):
        file = (Path(path) / FILE if Path(path).is_dir() else Path(path)).resolve()
        if file in seen:
            raise UsageError(f"{path} and {seen[file]} are the same report; give it once")
        seen[file] = path
        study = read(path)
        try:
            data = json.loads(file.read_text(encoding="utf-8"))
            claims = [r.get("summary") for r in data.get("policies") or [data]]
            found += [_counted(p, claimed) for p, claimed in zip(study.policies, claims)]
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as e:
            raise UsageError(f"{file} is no report of this project ({type(e).__name__}: {e}); write it anew with --resume") from e
    return found


def _ranked(found: Sequence[_Read], speedups: bool = True) -> Board:
    if not found or not any(f.outcomes for f in found):
        raise UsageError("the reports hold no answers; give folders that eval/report.py wrote")
    _refuse(found, speedups)
    notes = [n for f in found for n in f.notes] + _apart(found)
    untimed = [f.name for f in found if not f.study.timed]
    every = speedups and not untimed
    if speedups and 0 < len(untimed) < len(found):
        notes.append(f"no speedups are ranked: {', '.join(untimed)} was not timed")
    common = set.intersection(*({t for t, _, _ in f.timings} for f in found)) if every else set()

    def worth(e: Entry) -> tuple[float, float]:
        return -(e.correct_rate if e.correct_rate is not None else -1.0), -(e.speedup or 0.0)

    entries = sorted((_entry(f, every, common) for f in found), key=lambda e: (*worth(e), e.policy, e.report))
    worths = [worth(e) for e in entries]
    ranked = [dataclasses.replace(e, rank=1 + worths.index(worth(e))) for e in entries]
    masked = [f"{e.policy}: {e.masked} of {e.answers + e.masked}" for e in ranked if e.masked]
    if masked:
        notes.append("answers that nobody judged (infrastructure faults) are in no rate: " + "; ".join(masked))
    about: dict[str, Any] = {k: ", ".join(sorted(_facet(found[0], k))) for k in _KEYS}
    about |= {"tasks": len({r.task for r in found[0].study.rows}), "device": ", ".join(sorted({e.device for e in ranked}))}
    return Board(tuple(ranked), about, tuple(dict.fromkeys(notes)))


def _counted(p: PolicyStudy, claimed: Any) -> _Read:
    """Turn rows into outcomes again, which checks each row, then check the report's own sums against them."""
    rows = {(r.task, r.sample): r for r in reversed(p.rows)}
    p, twice = dataclasses.replace(p, rows=tuple(reversed(rows.values()))), len(p.rows) - len(rows)
    checked = [_outcome(r.raw) for r in p.rows]
    outcomes = [o for o, _ in checked]
    found = _Read(p, tuple(outcomes), ())
    _entry(found, True, set())  # fails here for rows that cannot be summed, while the file is known
    notes = [f"{twice} answers occur several times and count once"] * bool(twice)
    for problem in dict.fromkeys(why for _, why in checked if why):
        bad = [o.task for o, why in checked if why == problem]
        notes.append(f"{len(bad)} rows {problem}: {_some(bad)}")
    if claimed is not None:
        truth: dict[str, Any] = {**summarise(outcomes, p.timed), "spent": _spent(p)}
        wrong = [k for k in truth if not _same(truth[k], claimed.get(k) if isinstance(claimed, Mapping) else None)]
        if wrong:
            notes.append(f"the report's own sums do not match its rows ({', '.join(wrong)}); counted anew from the rows")
    return dataclasses.replace(found, notes=tuple(f"{found.name}: {n}" for n in notes))


def _outcome(raw: Mapping[str, Any]) -> tuple[Outcome, str]:
    """Return the outcome of a row, and what is wrong with it. A row that contradicts itself counts as wrong, not masked."""
    try:
        o = Outcome.from_dict(raw)
        if (o.fault is Fault.INFRA) != (o.verdict is Verdict.INFRA_FAULT) or not isinstance(o.manifest, Mapping):
            raise ValueError("masked, though there is a verdict")
    except (ValueError, KeyError, TypeError, AttributeError):
        backend, grading = (str(raw.get(k, UNSAID)) for k in ("backend", "grading"))
        about = m if isinstance(m := raw.get("manifest"), Mapping) else {}
        o = Outcome(raw["task"], Verdict.INCORRECT, Stage.CORRECT, backend, grading, Fault.POLICY, manifest=about)
        return o, "contradict themselves and count as wrong"
    if o.correct != raw.get("correct"):
        return o, "say something else of being correct than their verdict; the verdict counts"
    t = o.timing
    if t is None:
        return o, ""
    try:
        parts = [math.log(c.speedup) for c in t.cases] or [math.log(t.speedup)]
        sound = math.isclose(statistics.fmean(parts), math.log(t.speedup), abs_tol=1e-3) and t.low <= t.speedup <= t.high
        why = "" if sound else "that their own cases contradict"
        if any(c.void for c in t.cases) or (t.floor_ratio is not None and t.speedup > 1.1 * t.floor_ratio):
            why = "beyond what the device allows"
    except (ValueError, TypeError, OverflowError):
        why = "that is no number"
    return (dataclasses.replace(o, timing=None), f"have a speedup {why}, which is left out") if why else (o, "")


def _spent(p: PolicyStudy) -> dict[str, Any]:
    """Sum the resources of answers as `spending` does; ``None`` for a number that no answer has."""
    rows = [r.spent for r in p.rows]
    known = {k: [v for r in rows if isinstance(v := r.get(k), int | float) and math.isfinite(v)] for k in spending([])}
    return {k: sum(v) if v else None for k, v in known.items()}


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return all(_same(a.get(k), b.get(k)) for k in a.keys() | b.keys())
    if isinstance(a, int | float) and isinstance(b, int | float):
        return math.isclose(a, b, rel_tol=1e-6, abs_tol=1e-9)
    return bool(a == b)


def _facet(f: _Read, name: str) -> set[str]:
    """Return the values of a condition in a report's rows and manifest; a single run has one value."""
    key = _KEYS[name]
    judged = [o for o in f.outcomes if o.fault is not Fault.INFRA]
    own = [{**o.manifest, "grading": o.grading, "backend": o.backend}.get(key) for o in judged]
    if key == "without":
        return {str(v or "none") for v in own} or {"none"}
    unsaid = {"sizes": PUBLISHED, "precision": "report"}.get(key, UNSAID)
    return {str(v) for v in (*own, f.study.manifest.get(key)) if v is not None} or {unsaid}


def _groups(found: Sequence[_Read], values: Iterable[Iterable[Any]]) -> dict[str, list[str]]:
    """Group reports by the values that they have.

    Args:
        found: the reports.
        values: the values of each report.

    Returns:
        Value -> names of the reports that have it.
    """
    pairs = [(value, f.name) for f, own in zip(found, values) for value in sorted(set(map(str, own)))]
    return {value: [name for v, name in pairs if v == value] for value, _ in pairs}


def _refuse(found: Sequence[_Read], speedups: bool) -> None:
    facets = {name: _groups(found, [_facet(f, name) for f in found]) for name in _KEYS}
    if speedups:
        facets["device of the speedups"] = _groups(found, [[device for _, _, device in f.timings] for f in found])
    differences = [_difference(name, groups) for name, groups in facets.items() if len(groups) > 1]
    sets = [{r.task for r in f.study.rows} for f in found]
    versions = {t: _groups(found, [f.versions.get(t, ()) for f in found]) for t in sorted(set().union(*sets))}
    changed = [t for t, groups in versions.items() if len(groups) > 1]
    if changed:
        text = _difference("task versions", versions[changed[0]])
        differences.append(text.replace("task versions:", f"task versions of {_some(changed)}: {changed[0]} is", 1))
    largest = max(sets, key=len)
    for f, tasks in zip(found, sets):
        lacks, more = largest - tasks, tasks - largest
        what = [f"lacks {_some(lacks)}"] * bool(lacks) + [f"has {_some(more)} besides"] * bool(more)
        if what:
            text = f"{f.name}, {len(tasks)} tasks (split {f.study.manifest.get('task_split', UNSAID)}), {' and '.join(what)}"
            differences.append(f"choice of tasks: {text}; {_REMEDY['choice of tasks']}")
    if differences:
        raise Incomparable("these reports do not compare:\n" + "\n".join(f"  - {d}" for d in differences))


def _difference(name: str, groups: Mapping[str, Sequence[str]]) -> str:
    groups_text = "; ".join(f"{value!r} in {', '.join(names[:4])}{' ...' * (len(names) > 4)}" for value, names in groups.items())
    return f"{name}: {groups_text}; {_REMEDY[name]}"


def _some(names: Iterable[str], most: int = 3) -> str:
    every = sorted(set(names))
    return ", ".join(every[:most]) + (f" and {len(every) - most} more" if len(every) > most else "")


def _apart(found: Sequence[_Read]) -> list[str]:
    """Return notes on differences that are allowed: versions of this project with the same tasks, of libraries, seeds."""
    notes = []
    for key, what in _MAY_DIFFER.items():
        groups = _groups(found, [[f.study.manifest.get(key, UNSAID)] for f in found])
        if len(groups) > 1:
            groups_text = "; ".join(f"{v[:40]} in {', '.join(names)}" for v, names in groups.items())
            notes.append(f"different {what}: {groups_text}" + "; the tasks are the same" * (key in ("kbx_env", "grader")))
    if any(UNSAID in said for f in found for said in f.versions.values()):
        notes.append("the reports do not say which version of the tasks they graded")
    return notes


def _needs(f: _Read) -> tuple[str, ...] | None:
    needs = f.study.about.get("needs") or {}
    # The rows count, not only the policy's own statement: a policy that received verdicts may have used them.
    reads = needs.get("grader_feedback") or any(r.turns for r in f.study.rows)
    tests = needs.get("own_tests") or any((r.spent.get("scripts") or 0) > 0 for r in f.study.rows)
    if not f.study.about and not reads and not tests:
        return None
    return ("reads verdicts",) * bool(reads) + ("own tests",) * bool(tests)


def _entry(f: _Read, speedups: bool, common: set[str]) -> Entry:
    known = [o for o in f.outcomes if o.fault is not Fault.INFRA]
    tasks: dict[str, list[bool]] = {}
    for o in known:
        tasks.setdefault(o.task, []).append(o.correct)
    share = statistics.fmean(statistics.fmean(v) for v in tasks.values()) if tasks else None
    low, high = (stats.wilson(share * len(tasks), len(tasks)) if share is not None else None) or (None, None)
    timings = f.timings if speedups else []
    logs = {task: [math.log(s) for t, s, _ in timings if t == task] for task in common}
    spent, about = _spent(f.study), f.study.manifest
    untold = bool(spent["untold"]) or any(r.spent.get("calls") is None for r in f.study.rows)
    tokens = [spent[k] for k in ("prompt_tokens", "completion_tokens")]
    return Entry(
        rank=0, policy=str(f.study.name), report=f.study.source, correct_rate=share, low=low, high=high, answers=len(known),
        masked=len(f.outcomes) - len(known), correct=sum(o.correct for o in known), tasks=len(tasks),
        speedup=math.exp(statistics.fmean(math.log(s) for _, s, _ in timings)) if timings else None, timed=len(timings),
        common_speedup=math.exp(statistics.fmean(map(statistics.fmean, logs.values()))) if logs else None,
        common=len(logs), pass_at=pass_at(known), calls=spent["calls"],
        tokens=None if None in tokens else sum(tokens), least=spent["calls"] is not None and untold,
        gradings=spent["gradings"], needs=_needs(f), model=str(m) if (m := f.study.about.get("model")) else None,
        device=str(about.get("device", UNSAID)), kbx_env=str(about.get("kbx_env", UNSAID)),
    )  # fmt: skip


def _cells(e: Entry) -> dict[str, str]:
    least = "≥ " if e.least else ""
    interval = "–" if e.low is None or e.high is None else f"{100 * e.low:.1f} to {100 * e.high:.1f} %"
    passes = [f"@{k} {formatting.percent(v)}" for k, v in e.pass_at.items()]
    common = f"{formatting.times(e.common_speedup)} ({e.common} tasks)" if e.common else "–"
    return {
        "rank": str(e.rank), "policy": e.policy, "correct": formatting.percent(e.correct_rate), "95 % interval": interval,
        "answers": f"{e.correct} of {e.answers}", "speedup": f"{formatting.times(e.speedup)} ({e.timed})" if e.timed else "–",
        "on common tasks": common, "LLM calls": least + formatting.amount(e.calls), "tokens": (least if e.tokens else "")
        + formatting.amount(e.tokens), "gradings": formatting.amount(e.gradings),
        "needs": "not said" if e.needs is None else ", ".join(e.needs) or "the task only", "pass": ", ".join(passes) or "–",
        "not judged": str(e.masked or "–"), "model": e.model or "–", "device": e.device, "report": e.report or "–",
    }  # fmt: skip


def markdown(board: Board) -> str:
    """Return the board as Markdown."""
    return render("leaderboard.md.j2", **_values(board))


def page(board: Board) -> str:
    """Return the board as one HTML page in the report's colours, without scripts and external resources."""
    return render("leaderboard.html.j2", texts=("policy", "needs", "pass", "model", "device", "report"), **_values(board))


def _values(board: Board) -> dict[str, Any]:
    """Return the variables that both templates show."""
    return {"about": _about(board), "rows": [*map(_cells, board.entries)], "notes": (*board.notes, _READ)}


def _about(board: Board) -> str:
    return " · ".join(f"{k.replace('_', ' ')}: {v}" for k, v in board.about.items())


FORMATS: Mapping[str, Callable[[Board], str]] = {
    ".md": markdown, ".html": page, ".json": lambda board: json.dumps(dataclasses.asdict(board), indent=1) + "\n",
}  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Rank; return 0 when the ranking is written, 2 on bad usage and on reports that cannot be compared."""
    p = argparse.ArgumentParser(description="Rank the policies of several reports.")
    p.add_argument("reports", nargs="+", metavar="DIR", help="the folder of a report, or its report.json")
    p.add_argument("--out", metavar="FILE", help="a file that ends in .md, .html or .json (default: Markdown to the screen)")
    p.add_argument("--no-speedups", action="store_true", help="leave speedups out: reports of different devices then compare")
    a = p.parse_args(argv)
    end = Path(a.out).suffix if a.out else ".md"
    if end not in FORMATS:
        p.error(f"--out is {a.out!r}; a file that ends in {', '.join(FORMATS)}")
    try:
        board = leaderboard(a.reports, not a.no_speedups)
        text = FORMATS[end](board)
        if a.out:
            Path(a.out).write_text(text, encoding="utf-8", errors="backslashreplace")
    except (UsageError, OSError, RecursionError) as e:
        print(f"leaderboard.py: {e}", file=sys.stderr)
        return 2
    print(f"leaderboard: {a.out}" if a.out else text.encode("utf-8", "backslashreplace").decode(), end="\n" if a.out else "")
    return 0


if __name__ == "__main__":
    sys.exit(main())
